"""Rows of a result as JSON, by the rules of ``contracts.query_api``.

A column is turned into plain values at once and by its type, never value by value where Arrow can do it; rows are
put together and encoded batch by batch, so that the Python values of one batch alone are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as is_

Values: TypeAlias = list[Any]
_encode = msgspec.json.Encoder().encode

_FOREVER = 2**63 - 1
_AT_ONCE = 8192


def encode_rows(batch: pa.RecordBatch, types: Sequence[str]) -> bytes:
    """The rows as JSON arrays with commas between them; ``types`` are DuckDB's names of the columns' types."""
    return _encode(plain_rows(batch, types))[1:-1]


def plain_rows(batch: pa.RecordBatch, types: Sequence[str]) -> list[tuple[Any, ...]]:
    columns = [plain_values(batch.column(at), name) for at, name in enumerate(types)]
    return list(zip(*columns, strict=True))


def encode_row(row: tuple[Any, ...]) -> bytes:
    return _encode(row)


def plain_values(array: pa.Array, name: str) -> Values:
    """``name`` is the column's DuckDB type: Arrow has one kind for what are several there."""
    kind = array.type
    for applies, convert in _RULES:
        if applies(kind):
            return convert(array, name)
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


def _decimals(array: pa.Array, name: str) -> Values:
    """HUGEINT comes as a decimal without digits behind the point, as DECIMAL(38,0) does."""
    text = _listed(pc.cast(array, pa.string()))
    if "HUGEINT" not in name or array.type.scale:
        return text
    return [None if value is None else int(value) for value in text]


def _bytes(array: pa.Array, _: str) -> Values:
    return [None if value is None else f"0x{value.hex()}" for value in _listed(array)]


def _timestamps(array: pa.Array, _: str) -> Values:
    zone = "Z" if array.type.tz else ""
    plain = array.cast(pa.timestamp(array.type.unit))
    text = _trimmed(pc.cast(plain, pa.string()))
    shown = pc.binary_join_element_wise(pc.replace_substring(text, " ", "T", max_replacements=1), zone, "")
    return _endless(shown, array.cast(pa.int64()))


def _dates(array: pa.Array, _: str) -> Values:
    return _endless(pc.cast(array, pa.string()), array.cast(pa.int32()), 2**31 - 1)


def _endless(text: pa.Array, numbers: pa.Array, forever: int = _FOREVER) -> Values:
    """``infinity`` and ``-infinity`` are the largest numbers of either sign, which no calendar reaches."""
    shown = _listed(text)
    for at, value in enumerate(shown):
        if value is not None and value.startswith("<"):
            number = numbers[at].as_py()
            shown[at] = "infinity" if number == forever else "-infinity" if number == -forever else None
    return shown


def _times(array: pa.Array, _: str) -> Values:
    return _listed(_trimmed(pc.cast(array, pa.string())))


def _trimmed(text: pa.Array) -> pa.Array:
    """Without a fraction that says nothing."""
    return pc.replace_substring_regex(text, r"\.0+$", "")


def _intervals(array: pa.Array, _: str) -> Values:
    return [None if value is None else _interval(*value) for value in _listed(array)]


def _interval(months: int, days: int, nanoseconds: int) -> str:
    """As DuckDB writes it: ``1 year 2 months 3 days 04:05:06.5``."""
    years, months = (abs(months) // 12 * _sign(months), abs(months) % 12 * _sign(months))
    parts = [
        f"{count} {unit}{'' if count in (1, -1) else 's'}"
        for count, unit in ((years, "year"), (months, "month"), (days, "day"))
        if count
    ]
    micros = nanoseconds // 1000
    if micros or not parts:
        seconds, fraction = divmod(abs(micros), 1_000_000)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        shown = f"{fraction:06}".rstrip("0")
        parts.append(f"{'-' if micros < 0 else ''}{clock}{'.' + shown if shown else ''}")
    return " ".join(parts)


def _sign(number: int) -> int:
    return -1 if number < 0 else 1


def _lists(array: pa.Array, name: str) -> Values:
    """The values of all lists at once, then cut apart. A list that is null has none of them."""
    values = plain_values(array.flatten(), name)
    lengths = _listed(pc.list_value_length(array))
    found, at = [], 0
    for length in lengths:
        found.append(None if length is None else values[at : at + length])
        at += length or 0
    return found


def _structs(array: pa.Array, name: str) -> Values:
    fields = [array.type.field(at).name for at in range(array.type.num_fields)]
    columns = [plain_values(each, name) for each in array.flatten()]
    there = _listed(array.is_valid())
    rows = zip(*columns, strict=True) if columns else iter([()] * len(there))
    return [
        dict(zip(fields, row, strict=True)) if valid else None for valid, row in zip(there, rows, strict=True)
    ]


def _maps(array: pa.Array, name: str) -> Values:
    pairs = _lists(
        array.cast(pa.list_(pa.struct([("k", array.type.key_type), ("v", array.type.item_type)]))), name
    )
    return [None if each is None else [[pair["k"], pair["v"]] for pair in each] for each in pairs]


def _unions(array: pa.Array, name: str) -> Values:
    members = [plain_values(array.field(at), name) for at in range(array.type.num_fields)]
    return [members[code][at] for at, code in enumerate(_listed(array.type_codes))]


def _dictionaries(array: pa.Array, name: str) -> Values:
    return plain_values(array.dictionary_decode(), name)


def _extensions(array: pa.Array, name: str) -> Values:
    return plain_values(array.storage, name)


def _is_list(kind: pa.DataType) -> bool:
    return bool(is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind))


_RULES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, str], Values]], ...] = (
    (is_.is_decimal, _decimals),
    (_is_bytes, _bytes),
    (is_.is_timestamp, _timestamps),
    (is_.is_date, _dates),
    (is_.is_time, _times),
    (is_.is_interval, _intervals),
    (is_.is_map, _maps),
    (_is_list, _lists),
    (is_.is_struct, _structs),
    (is_.is_union, _unions),
    (is_.is_dictionary, _dictionaries),
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _extensions),
)
