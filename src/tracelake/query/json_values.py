"""Rows of a result as JSON, by the rules of ``contracts.query_api``.

A column is turned into plain values at once and by its type, never value by value where Arrow can do it; rows are
put together and encoded batch by batch, so that the Python values of one batch alone are in memory. Values that
Arrow has no exact type for come as the engine's text (``engine.column_types``); days and instants come as numbers,
of which Arrow writes those of its own calendar, and the others are written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as is_

from tracelake.query.engine.column_types import ColumnType

Values: TypeAlias = list[Any]
_encode = msgspec.json.Encoder().encode

_AT_ONCE = 8192
_PLAIN = ColumnType("", "varchar")
_WHOLE = re.compile(r"-?[0-9]+")
_DAY_SECONDS = 86_400
#: Days from 1970-01-01 to 0001-01-01 and to 10000-01-01.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_897
_FOREVER_DAY, _FOREVER = 2**31 - 1, 2**63 - 1
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FRACTION_DIGITS = {"time": 6, "time_ns": 9}


def encode_rows(batch: pa.RecordBatch, columns: Sequence[ColumnType]) -> bytes:
    """The rows as JSON arrays with commas between them; ``columns`` are their types as the engine has them."""
    return _encode(plain_rows(batch, columns))[1:-1]


def plain_rows(batch: pa.RecordBatch, columns: Sequence[ColumnType]) -> list[tuple[Any, ...]]:
    values = [plain_values(batch.column(at), column) for at, column in enumerate(columns)]
    return list(zip(*values, strict=True))


def encode_row(row: tuple[Any, ...]) -> bytes:
    return _encode(row)


def plain_values(array: pa.Array, column: ColumnType) -> Values:
    """``column`` is the type in the engine: Arrow has one kind for what are several there."""
    kind = array.type
    for applies, convert in _RULES:
        if applies(kind):
            return convert(array, column)
    return _listed(array)


def _listed(array: pa.Array) -> Values:
    """By pieces: Arrow lets no other thread in before it is through, and a single row may have millions."""
    if len(array) <= _AT_ONCE:
        values: Values = array.to_pylist()
        return values
    values = []
    for start in range(0, len(array), _AT_ONCE):
        values += array.slice(start, _AT_ONCE).to_pylist()
    return values


def _texts(array: pa.Array, column: ColumnType) -> Values:
    match column.kind:
        case "hugeint" | "uhugeint" | "bignum":
            return [None if text is None else _number(text) for text in _listed(array)]
        case "time" | "time_ns":
            digits = _FRACTION_DIGITS[column.kind]
            return [None if text is None else _clock(text, digits) for text in _listed(array)]
        case _:
            return _listed(array)


def _number(text: str) -> msgspec.Raw:
    """All digits, however many: Python reads no more than some thousands of them."""
    if not _WHOLE.fullmatch(text):
        raise ValueError("not a whole number")
    return msgspec.Raw(text.encode())


def _clock(text: str, digits: int) -> str:
    whole, point, fraction = text.partition(".")
    return f"{whole}.{fraction.ljust(digits, '0')}" if point else whole


def _decimals(array: pa.Array, _: ColumnType) -> Values:
    """With all digits of the scale: Arrow writes small numbers with an exponent, as it does zero."""
    texts = _listed(pc.cast(array, pa.string()))
    return [text if text is None or "E" not in text else f"{Decimal(text):f}" for text in texts]


def _bytes(array: pa.Array, _: ColumnType) -> Values:
    return [None if value is None else f"0x{value.hex()}" for value in _listed(array)]


def _timestamps(array: pa.Array, _: ColumnType) -> Values:
    zone = "Z" if array.type.tz else ""
    day = _DAY_SECONDS * _PER_SECOND[array.type.unit]
    numbers = array.cast(pa.int64())
    if not _usual(numbers, _FIRST_DAY * day, _LAST_DAY * day - 1, _FOREVER):
        return [None if each is None else _instant(each, array.type) for each in _listed(numbers)]
    text = _trimmed(pc.cast(array.cast(pa.timestamp(array.type.unit)), pa.string()))
    return _listed(
        pc.binary_join_element_wise(pc.replace_substring(text, " ", "T", max_replacements=1), zone, "")
    )


def _dates(array: pa.Array, _: ColumnType) -> Values:
    numbers = array.cast(pa.int32())
    if not _usual(numbers, _FIRST_DAY, _LAST_DAY - 1, _FOREVER_DAY):
        return [
            None if each is None else _endless(each, _FOREVER_DAY) or _day(each) for each in _listed(numbers)
        ]
    return _listed(pc.cast(array, pa.string()))


def _usual(numbers: pa.Array, first: int, last: int, forever: int) -> bool:
    """Whether all are in the years 1 to 9999 and finite: Arrow writes those as everybody does."""
    found = pc.min_max(numbers).as_py()
    low, high = found["min"], found["max"]
    return low is None or (first <= low and high <= last and -forever < low and high < forever)


def _endless(number: int, forever: int) -> str | None:
    """``infinity`` and ``-infinity`` are the largest numbers of either sign, which no calendar reaches."""
    return {forever: "infinity", -forever: "-infinity"}.get(number)


def _instant(number: int, kind: pa.DataType) -> str:
    if (endless := _endless(number, _FOREVER)) is not None:
        return endless
    per_second = _PER_SECOND[kind.unit]
    seconds, fraction = divmod(number, per_second)
    days, second = divmod(seconds, _DAY_SECONDS)
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    if fraction:
        clock += f".{fraction:0{len(str(per_second)) - 1}}"
    day = _day(days)
    if day.endswith(")"):
        # As the engine writes it, and reads it.
        return f"{day} {clock}{'+00' if kind.tz else ''}"
    return f"{day}T{clock}{'Z' if kind.tz else ''}"


def _day(days: int) -> str:
    """Of the Gregorian calendar without bounds, by eras of 400 years that begin in March."""
    era, of_era = divmod(days + 719_468, 146_097)
    year_of_era = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    from_march = (5 * of_year + 2) // 153
    day = of_year - (153 * from_march + 2) // 5 + 1
    month = from_march + 3 if from_march < 10 else from_march - 9
    year = year_of_era + 400 * era + (month <= 2)
    if year > 0:
        return f"{year:04}-{month:02}-{day:02}"
    return f"{1 - year:04}-{month:02}-{day:02} (BC)"


def _times(array: pa.Array, _: ColumnType) -> Values:
    return _listed(_trimmed(pc.cast(array, pa.string())))


def _trimmed(text: pa.Array) -> pa.Array:
    """Without a fraction that says nothing."""
    return pc.replace_substring_regex(text, r"\.0+$", "")


def _lists(array: pa.Array, column: ColumnType) -> Values:
    """The values of all lists at once, then cut apart. A list that is null has none of them."""
    values = plain_values(array.flatten(), _inner(column, 0))
    lengths = _listed(pc.list_value_length(array))
    found, at = [], 0
    for length in lengths:
        found.append(None if length is None else values[at : at + length])
        at += length or 0
    return found


def _structs(array: pa.Array, column: ColumnType) -> Values:
    fields = [array.type.field(at).name for at in range(array.type.num_fields)]
    columns = [plain_values(each, _inner(column, at)) for at, each in enumerate(array.flatten())]
    there = _listed(array.is_valid())
    rows = zip(*columns, strict=True) if columns else iter([()] * len(there))
    return [
        dict(zip(fields, row, strict=True)) if valid else None for valid, row in zip(there, rows, strict=True)
    ]


def _maps(array: pa.Array, column: ColumnType) -> Values:
    pair = pa.struct([("k", array.type.key_type), ("v", array.type.item_type)])
    pairs = _lists(
        array.cast(pa.list_(pair)), ColumnType("", "list", (ColumnType("", "struct", column.inner),))
    )
    return [None if each is None else [[pair["k"], pair["v"]] for pair in each] for each in pairs]


def _unions(array: pa.Array, column: ColumnType) -> Values:
    members = [plain_values(array.field(at), _inner(column, at)) for at in range(array.type.num_fields)]
    return [members[code][at] for at, code in enumerate(_listed(array.type_codes))]


def _inner(column: ColumnType, at: int) -> ColumnType:
    return column.inner[at] if at < len(column.inner) else _PLAIN


def _dictionaries(array: pa.Array, column: ColumnType) -> Values:
    return plain_values(array.dictionary_decode(), column)


def _extensions(array: pa.Array, column: ColumnType) -> Values:
    return plain_values(array.storage, column)


def _is_list(kind: pa.DataType) -> bool:
    return bool(is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(is_.is_string(kind) or is_.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind))


_RULES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, ColumnType], Values]], ...] = (
    (_is_text, _texts),
    (is_.is_decimal, _decimals),
    (_is_bytes, _bytes),
    (is_.is_timestamp, _timestamps),
    (is_.is_date, _dates),
    (is_.is_time, _times),
    (is_.is_map, _maps),
    (_is_list, _lists),
    (is_.is_struct, _structs),
    (is_.is_union, _unions),
    (is_.is_dictionary, _dictionaries),
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _extensions),
)
