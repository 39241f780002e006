"""Rows between Arrow and Postgres, column by column, as the CSV of COPY.

Only nested values are converted one by one. NULL is an empty field and '' a quoted one, both ways; bytes are sent
as hex, exact numbers as their digits. Values that Postgres can't store are refused here, with the column's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
from psycopg import sql

from tracelake.domain.errors import Invalid

CsvPiece = bytes | bytearray | memoryview

OPTIONS = "FORMAT csv, HEADER false, ENCODING 'UTF8'"
_ROWS_AT_ONCE = 32 * 1024
_PIECE_BYTES = 4 * 1024 * 1024
_PREFIX = "\\x"
# The two digits of a byte are one number of 16 bits, so one lookup gives both.
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)
_NIBBLE = np.zeros(256, dtype=np.uint8)
_NIBBLE[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16, dtype=np.uint8)


def encoded(table: pa.Table) -> Iterator[pa.Buffer]:
    """A table as CSV, a piece at a time."""
    options = pacsv.WriteOptions(include_header=False, quoting_style="needed")
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
        columns = [
            _for_csv(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        sink = pa.BufferOutputStream()
        pacsv.write_csv(pa.RecordBatch.from_arrays(columns, names=batch.schema.names), sink, options)
        yield sink.getvalue()


def decoded(rows: Iterable[CsvPiece], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The output of COPY, which has one piece for each row, as batches. The columns must be ``selected`` ones."""
    gathered: list[CsvPiece] = []
    size = 0
    for row in rows:
        gathered.append(row)
        size += len(row)
        if size >= _PIECE_BYTES:
            yield from _parsed(b"".join(gathered), schema)
            gathered.clear()
            size = 0
    if gathered:
        yield from _parsed(b"".join(gathered), schema)


def selected(name: str, kind: pa.DataType) -> sql.Composed:
    """A column, for a SELECT whose rows ``decoded`` reads."""
    form = "encode({}, 'hex')" if pa.types.is_binary(kind) else "{}"
    return sql.SQL(form).format(sql.Identifier(name))


def _parsed(content: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    table = pacsv.read_csv(
        pa.BufferReader(content),
        read_options=pacsv.ReadOptions(
            # One block: a row must not be split, since quoted values may contain line breaks.
            column_names=schema.names,
            block_size=len(content) + 1,
            use_threads=False,
        ),
        parse_options=pacsv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pacsv.ConvertOptions(
            column_types={field.name: _type_in_csv(field.type) for field in schema},
            null_values=[""],
            true_values=["t"],
            false_values=["f"],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    for batch in table.to_batches():
        columns = [_from_csv(column, field.type) for column, field in zip(batch.columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _for_csv(name: str, column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_string(kind):
        # Postgres would refuse the whole COPY without naming the column.
        if pc.any(pc.match_substring(column, "\0")).as_py():
            raise Invalid("RowsRefused", f"column {name!r}: Postgres can't keep text with NUL characters")
        return column
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        # Values of fixed size have no offsets, which ``_hex`` goes by.
        return _hex(column.cast(pa.binary()))
    if pa.types.is_nested(kind):
        return pa.array(
            [None if value is None else _json(value) for value in column.to_pylist()], pa.string()
        )
    if pa.types.is_decimal(kind):
        return column.cast(pa.string())
    return column


def _type_in_csv(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_binary(kind) else kind


def _from_csv(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return _unhex(column) if pa.types.is_binary(kind) else column


def _hex(column: pa.Array) -> pa.Array:
    """``\\x…`` of each value; the digits of all of them are looked up at once."""
    offsets, content = _buffers(column)
    digits = _HEX[content]
    spelt = _strings(pa.string(), (offsets - offsets[0]) * 2, digits, column)
    return pc.binary_join_element_wise(_PREFIX, spelt, "")


def _unhex(column: pa.Array) -> pa.Array:
    offsets, content = _buffers(column)
    nibbles = _NIBBLE[content]
    joined = (nibbles[0::2] << 4) | nibbles[1::2]
    return _strings(pa.binary(), (offsets - offsets[0]) // 2, joined, column)


def _buffers(column: pa.Array) -> tuple[Any, Any]:
    """Where values begin and end, and the bytes of all of them. The bytes behind a null count as well."""
    _, places, content = column.buffers()
    size = len(column) + 1
    offsets = np.frombuffer(places, dtype=np.int32)[column.offset : column.offset + size] if places else None
    if offsets is None or not len(offsets):
        return np.zeros(size, dtype=np.int32), np.zeros(0, dtype=np.uint8)
    octets = np.frombuffer(content, dtype=np.uint8) if content else np.zeros(0, dtype=np.uint8)
    return offsets, octets[offsets[0] : offsets[-1]]


def _strings(kind: pa.DataType, offsets: Any, content: Any, like: pa.Array) -> pa.Array:
    """An array with the nulls of another one."""
    valid = None
    if like.null_count:
        valid = pa.array(like.is_valid()).buffers()[1]
    buffers = [valid, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(content)]
    return pa.Array.from_buffers(kind, len(like), buffers, null_count=like.null_count)


def _json(value: Any) -> str:
    """Bytes in hex, as the chain's own JSON has them; exact numbers as text."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_UTC_Z).decode()
    except (TypeError, orjson.JSONEncodeError) as error:
        raise Invalid("RowsRefused", f"a nested value can't be kept as JSON: {error}") from None


def _plain(value: object) -> Any:
    match value:
        case bytes():
            return "0x" + value.hex()
        case Decimal():
            return str(value)
        case datetime() | date():
            return value.isoformat()
        case Mapping():
            return dict(value)
        case _:
            raise TypeError(f"{type(value).__name__} in a nested column")
