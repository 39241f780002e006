"""The columns of logs. A block may have tens of thousands, so topics are cut out of one matrix, not picked
one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from tracelake.evm.bad_value import BadValue
from tracelake.evm.block_errors import BlockMalformed
from tracelake.evm.foreign_text import shown
from tracelake.evm.hex_columns import cut, places, unhex_fixed, varying_bytes
from tracelake.evm.nested_columns import must_be_lists
from tracelake.evm.raw_block import RawBlock
from tracelake.evm.rows import ADDRESS, HASH, Rows

TOPICS = 4


def log_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, dict[str, pa.Array]]:
    rows = Rows(raw, [_logs_of(one) for one in raw], "logs")
    topics = rows.column("topics", _topics)
    return rows, {
        "transaction_index": rows.column("transactionIndex", places),
        "log_index": rows.column("logIndex", places),
        "transaction_hash": rows.column("transactionHash", HASH),
        "address": rows.column("address", ADDRESS),
        **{f"topic{place}": topic for place, topic in enumerate(topics)},
        "data": rows.column("data", varying_bytes),
    }


def _logs_of(raw: RawBlock) -> list[Any]:
    try:
        return list(chain.from_iterable([receipt["logs"] for receipt in raw.receipts or ()]))
    except (KeyError, TypeError):
        raise BlockMalformed(raw.number, raw.endpoint, "receipts[].logs", "is missing") from None


def _topics(lists: Sequence[Any]) -> list[pa.Array]:
    """One column for each place; null where a log has fewer topics."""
    must_be_lists(lists)
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    if len(lists) and lengths.max() > TOPICS:
        index = int(lengths.argmax())
        raise BadValue(index, f"has more than {TOPICS} topics: {shown(lists[index])}")
    ends = np.cumsum(lengths)
    try:
        data = unhex_fixed(list(chain.from_iterable(lists)), 32)
    except BadValue as bad:
        owner = int(np.searchsorted(ends, bad.index, side="right"))
        raise BadValue(owner, f"has one that {bad.problem}") from None
    matrix, starts = np.frombuffer(data, np.uint8).reshape(-1, 32), ends - lengths
    return [_place(matrix, starts, lengths > place, place) for place in range(TOPICS)]


def _place(matrix: Any, starts: Any, has: Any, place: int) -> pa.Array:
    if not has.any():
        return pa.nulls(len(has), pa.binary())
    return cut(matrix[starts[has] + place].tobytes(), 32, None if has.all() else has)
