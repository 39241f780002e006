"""Between the shape of files and that of hot tables: a uint256 is three columns there and one ``numeric``
here.

Arrow has no decimal of 78 digits, and JSON no bytes; so both travel as text, a nested column as JSON with
hexadecimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.evm.columns import ARROW, NESTED, UINT256_PARTS, WEI, Column, Kind, arrow_fields, hot_field
from tracelake.evm.hex_columns import cut

_, _STRING_PART, _ = UINT256_PARTS
_DECIMAL_DIGITS = 38


def to_hot(table: pa.Table, columns: Sequence[Column]) -> pa.Table:
    return pa.table(
        [_hot_column(table, column) for column in columns],
        schema=pa.schema([hot_field(column) for column in columns]),
    )


def from_hot(table: pa.Table, columns: Sequence[Column]) -> pa.Table:
    found = [part for column in columns for part in _stored_columns(table.column(column.name), column)]
    return pa.table(found, schema=pa.schema([field for column in columns for field in arrow_fields(column)]))


def _hot_column(table: pa.Table, column: Column) -> pa.ChunkedArray | pa.Array:
    if column.kind is Kind.UINT256:
        return table.column(column.name + _STRING_PART)
    values = table.column(column.name)
    return _json_texts(values) if column.kind in NESTED else values


def _json_texts(lists: pa.ChunkedArray) -> pa.Array:
    """Most lists are absent or empty, and only the others are looked at one by one."""
    lengths = pc.list_value_length(lists).combine_chunks()
    texts = pc.if_else(pc.equal(lengths, 0), "[]", pa.scalar(None, pa.string()))
    filled = pc.fill_null(pc.greater(lengths, 0), False)
    if not pc.any(filled).as_py():
        return texts
    written = [orjson.dumps(value, default=_plain).decode() for value in lists.filter(filled).to_pylist()]
    return pc.replace_with_mask(texts, filled, pa.array(written, pa.string()))


def _stored_columns(values: pa.ChunkedArray, column: Column) -> list[pa.ChunkedArray | pa.Array]:
    if column.kind is Kind.UINT256:
        texts = pc.cast(values, pa.string()).combine_chunks()
        return [_big_endian(texts), texts, pc.cast(texts, pa.float64())]
    kind = ARROW[column.kind]
    return [_parsed(values, kind) if column.kind in NESTED else pc.cast(values, kind)]


def _parsed(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Each different text is parsed once; most of them are ``[]``."""
    coded = texts.combine_chunks().dictionary_encode()
    parsed = [_from_json(orjson.loads(text), kind) for text in coded.dictionary.to_pylist()]
    return pa.array(parsed, kind).take(coded.indices)


def _big_endian(texts: pa.Array) -> pa.Array:
    """Decimal text as 32 bytes. Numbers that a decimal of Arrow can hold are converted all at once."""
    short = pc.fill_null(pc.less(pc.utf8_length(texts), _DECIMAL_DIGITS), False)
    decimals = pc.cast(pc.if_else(short, texts, "0"), WEI)
    halves = np.frombuffer(decimals.buffers()[1], np.uint8)[: 16 * len(texts)].reshape(-1, 16)
    digits = np.zeros((len(texts), 32), np.uint8)
    digits[:, 16:] = halves[:, ::-1]
    mask = texts.is_valid().to_numpy(zero_copy_only=False)
    long = mask & ~short.to_numpy(zero_copy_only=False)
    whole = b"".join([int(text).to_bytes(32, "big") for text in texts.filter(pa.array(long)).to_pylist()])
    digits[long] = np.frombuffer(whole, np.uint8).reshape(-1, 32)
    return cut(digits[mask].tobytes(), 32, None if mask.all() else mask)


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


def _from_json(value: Any, kind: pa.DataType) -> Any:
    """The same value with bytes and decimals where ``kind`` has them."""
    if value is None:
        return None
    if pa.types.is_list(kind):
        return [_from_json(element, kind.value_type) for element in value]
    if pa.types.is_struct(kind):
        return {field.name: _from_json(value.get(field.name), field.type) for field in kind}
    if pa.types.is_binary(kind):
        return bytes.fromhex(value[2:])
    return Decimal(value) if pa.types.is_decimal(kind) else value
