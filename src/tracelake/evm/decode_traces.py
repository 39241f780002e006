"""The columns of traces, in the shape of OpenEthereum's trace_block, which Erigon, Reth and Nethermind give
as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tracelake.evm.bad_value import BadValue
from tracelake.evm.decode_blocks import uint256_columns
from tracelake.evm.foreign_text import shown
from tracelake.evm.hex_columns import integers, uint256, varying_bytes
from tracelake.evm.raw_block import RawBlock
from tracelake.evm.rows import ADDRESS, HASH, Convert, Rows

Columns = dict[str, pa.Array]


def trace_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, Columns]:
    rows = Rows(raw, [one.traces for one in raw], "traces")
    kinds = rows.column("type", _texts)
    columns: Columns = {
        "trace_index": pa.array(_places(rows)),
        "transaction_index": rows.optional("transactionPosition", _plain_integers),
        "transaction_hash": rows.optional("transactionHash", HASH),
        "trace_address": rows.column("traceAddress", _addresses),
        "subtraces": rows.column("subtraces", _plain_integers),
        "action_type": kinds,
        "action_call_type": _part(rows, "action", ("callType",), _texts),
        "action_reward_type": _part(rows, "action", ("rewardType",), _texts),
        "action_from": _part(rows, "action", ("from", "address"), ADDRESS),
        "action_to": _part(rows, "action", ("to", "refundAddress", "author"), ADDRESS),
        "action_gas": _part(rows, "action", ("gas",), integers),
        "action_input": _part(rows, "action", ("input",), varying_bytes),
        "action_init": _part(rows, "action", ("init",), varying_bytes),
        "result_gas_used": _part(rows, "result", ("gasUsed",), integers),
        "result_output": _part(rows, "result", ("output",), varying_bytes),
        "result_code": _part(rows, "result", ("code",), varying_bytes),
        "result_address": _part(rows, "result", ("address",), ADDRESS),
        "error": rows.optional("error", _texts),
    }
    columns |= uint256_columns("action_value", _part(rows, "action", ("value", "balance"), uint256))
    return rows, columns


def _part(rows: Rows, part: str, keys: tuple[str, ...], convert: Convert) -> Any:
    """A field of the action or the result; several keys are what different actions call the same thing."""
    values = []
    for item in rows.objects:
        fields = item.get(part) or {}
        values.append(next((fields[key] for key in keys if fields.get(key) is not None), None))
    return rows.convert(f"{part}.{keys[0]}", values, convert)


def _places(rows: Rows) -> Any:
    starts = np.cumsum(rows.counts) - rows.counts
    return np.arange(len(rows)) - rows.per_row(starts)


def _texts(values: Sequence[Any]) -> pa.Array:
    for index, value in enumerate([value for value in values if value is not None]):
        if not isinstance(value, str):
            raise BadValue(index, f"isn't text: {shown(value)}")
    return pa.array(values, pa.string())


def _plain_integers(values: Sequence[Any]) -> pa.Array:
    """Traces count in JSON numbers, unlike everything else."""
    for index, value in enumerate([value for value in values if value is not None]):
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise BadValue(index, f"isn't a number: {shown(value)}")
    return pa.array(values, pa.int64())


def _addresses(values: Sequence[Any]) -> pa.Array:
    for index, value in enumerate(values):
        if not isinstance(value, list) or any(type(step) is not int for step in value):
            raise BadValue(index, f"isn't a list of numbers: {shown(value)}")
    return pa.array(["_".join(map(str, value)) for value in values], pa.string())
