"""Blocks as JSON-RPC gives them to Arrow columns, in the shape and the order of ``schemas.TABLES``.

What clients answer differently for one and the same block is made alike here (types that are left out, access
lists of legacy transactions, prices of blobs for transactions without any), so that a table doesn't depend on
who was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracelake.domain.errors import Invalid
from tracelake.evm.columns import INSTANT
from tracelake.evm.decode_blocks import block_columns, withdrawal_columns
from tracelake.evm.decode_logs import log_columns
from tracelake.evm.decode_traces import trace_columns
from tracelake.evm.decode_transactions import receipt_columns, transaction_columns
from tracelake.evm.hex_columns import cut, microseconds, unhex_fixed
from tracelake.evm.raw_block import Dataset, RawBlock
from tracelake.evm.rows import Rows
from tracelake.evm.schemas import TABLES

Columns = dict[str, pa.Array]

_DECODERS: dict[Dataset, Callable[[Sequence[RawBlock], Rows], tuple[Rows, Columns]]] = {
    Dataset.BLOCKS: block_columns,
    Dataset.TRANSACTIONS: transaction_columns,
    Dataset.LOGS: log_columns,
    Dataset.RECEIPTS: receipt_columns,
    Dataset.WITHDRAWALS: withdrawal_columns,
    Dataset.TRACES: trace_columns,
}
_NEEDS_RECEIPTS = (Dataset.LOGS, Dataset.RECEIPTS)


def decode(raw: Sequence[RawBlock], dataset: Dataset, chain_id: int) -> pa.RecordBatch:
    """The rows of one table. A field that can't be read raises ``BlockMalformed``."""
    table = TABLES[dataset]
    if not raw:
        return pa.RecordBatch.from_pylist([], schema=table.arrow)
    _must_have_parts(raw, dataset)
    blocks = Rows(raw, [[one.block] for one in raw], "")
    rows, columns = _DECODERS[dataset](raw, blocks)
    columns |= _block_columns(raw, blocks, rows, chain_id)
    batch = pa.RecordBatch.from_arrays([columns[name] for name in table.arrow.names], schema=table.arrow)
    return _in_order(batch, table.sort_by)


def _block_columns(raw: Sequence[RawBlock], blocks: Rows, rows: Rows, chain_id: int) -> Columns:
    """The columns that every table has."""
    hashes = blocks.column("hash", lambda values: unhex_fixed(values, 32))
    times = blocks.column("timestamp", microseconds)
    numbers = np.fromiter([one.number for one in raw], np.int64, len(raw))
    of_rows = rows.per_row(np.frombuffer(hashes, np.uint8).reshape(-1, 32))
    return {
        "chain_id": pa.array(np.full(len(rows), chain_id, np.int64)),
        "block_number": pa.array(rows.per_row(numbers)),
        "block_hash": cut(of_rows.tobytes(), 32),
        "timestamp": pa.array(rows.per_row(times)).view(INSTANT),
    }


def _must_have_parts(raw: Sequence[RawBlock], dataset: Dataset) -> None:
    for one in raw:
        if dataset in _NEEDS_RECEIPTS and one.receipts is None:
            raise Invalid("ReceiptsMissing", f"{dataset} come from receipts, and block {one.number} has none")
        if dataset is Dataset.TRACES and one.traces is None:
            raise Invalid("TracesMissing", f"block {one.number} was fetched without its traces")


def _in_order(batch: pa.RecordBatch, sort_by: tuple[str, ...]) -> pa.RecordBatch:
    """An endpoint's order is almost always the right one, and cheaper to check than to make."""
    keys: list[npt.NDArray[Any]] = [batch.column(name).to_numpy() for name in reversed(sort_by)]
    rising = np.ones(max(len(batch) - 1, 0), np.bool_)
    for key in keys:
        rising = (key[:-1] < key[1:]) | ((key[:-1] == key[1:]) & rising)
    return batch if rising.all() else batch.take(pa.array(np.lexsort(keys)))
