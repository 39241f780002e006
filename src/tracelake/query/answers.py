"""The formats of an answer: JSON and an Arrow stream here, a Parquet file in ``export``.

A form takes the batches as they come from the slot and keeps the answer within its limit. Nothing of it is visible
before ``publish``, which comes after the audit row.

JSON follows the rules of ``contracts.query_api``. Columns are converted as a whole and by type, not value by value,
where Arrow can do it; rows are assembled and encoded batch by batch, so that only one batch is in memory as Python
values. Values without an exact Arrow type come as the engine's text (``engine.column_types``). Dates and timestamps
come as numbers: Arrow formats those of its own calendar, and the others are formatted here.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol, TypeAlias
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as is_

from tracelake.contracts.headers import QUERY_ID_HEADER, ROW_COUNT_HEADER, TRUNCATED_HEADER
from tracelake.contracts.query_api import ARROW_STREAM, TYPE_FIELD, QueriedDataset
from tracelake.query.engine.column_types import ResultColumnType, ResultFormat, weight
from tracelake.serving.response import JSON, Response

#: Rows of more weight are encoded in a thread, so that other requests are served meanwhile.
INLINE_BYTES = 64 * 1024
ROWS_AT_ONCE = 2048
ColumnValues: TypeAlias = list[Any]
_AT_ONCE = 8192
_PLAIN = ResultColumnType("", "varchar")
_WHOLE = re.compile(r"-?[0-9]+")
_DAY_SECONDS = 86_400
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FRACTION_DIGITS = {"time": 6, "time_ns": 9}
#: Days from 1970-01-01 to 0001-01-01 and to 10000-01-01.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_897
#: The engine's numbers for infinity, as days and as timestamps.
_FOREVER_DAY, _FOREVER = 2**31 - 1, 2**63 - 1
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ResultMetadata:
    """The contents of an answer besides its rows."""

    query_id: UUID
    datasets: Sequence[QueriedDataset]
    truncated: bool


class ResultWriter(Protocol):
    """``rows``: number of rows so far; ``full``: rows had to be left out to stay within the limit."""

    kind: ResultFormat
    rows: int
    full: bool

    async def begin(self, schema: pa.Schema, columns: Sequence[ResultColumnType]) -> None: ...

    async def add(self, batch: pa.RecordBatch) -> None: ...

    async def seal(self) -> None:
        """Called after the last row, to do everything that may fail."""
        ...

    async def publish(self, facts: ResultMetadata) -> Response: ...

    async def discard(self) -> None:
        """Release all resources; also called after ``publish``."""
        ...


class JsonResultWriter:
    kind = ResultFormat.JSON

    def __init__(self, most_bytes: int) -> None:
        self.rows = 0
        self.full = False
        self._left = most_bytes
        self._pieces: list[bytes] = []
        self._head = b""
        self._columns: Sequence[ResultColumnType] = ()

    async def begin(self, schema: pa.Schema, columns: Sequence[ResultColumnType]) -> None:
        self._columns = columns
        types = [column.name for column in columns]
        # Without the closing brace: ``publish`` appends the rest of the object.
        self._head = msgspec.json.encode({"columns": schema.names, "types": types})[:-1]

    async def add(self, batch: pa.RecordBatch) -> None:
        if self.full or not batch.num_rows:
            return
        if weight(batch) > INLINE_BYTES:
            await asyncio.to_thread(self._add, batch)
        else:
            self._add(batch)

    def _add(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            some = batch.slice(start, ROWS_AT_ONCE)
            encoded = encode_rows(some, self._columns)
            if len(encoded) > self._left:
                self.full = True
                self._keep_first(some)
                return
            self._keep(encoded, some.num_rows)

    def _keep_first(self, batch: pa.RecordBatch) -> None:
        for row in plain_rows(batch, self._columns):
            encoded = encode_row(row)
            if len(encoded) > self._left:
                return
            self._keep(encoded, 1)

    def _keep(self, encoded: bytes, rows: int) -> None:
        self._pieces.append(encoded)
        # One more for the comma.
        self._left -= len(encoded) + 1
        self.rows += rows

    async def seal(self) -> None: ...

    async def publish(self, facts: ResultMetadata) -> Response:
        rest = {
            "row_count": self.rows,
            "truncated": facts.truncated,
            "query_id": facts.query_id,
            "datasets": facts.datasets,
        }
        rows = b",".join(self._pieces)
        body = b"".join((self._head, b',"rows":[', rows, b"],", msgspec.json.encode(rest)[1:]))
        return Response(body, media_type=JSON, headers=_headers(facts, self.rows))

    async def discard(self) -> None:
        self._pieces = []


class ArrowResultWriter:
    kind = ResultFormat.ARROW

    def __init__(self, most_bytes: int) -> None:
        self.rows = 0
        self.full = False
        self._most = most_bytes
        self._into = io.BytesIO()
        self._stream: pa.RecordBatchStreamWriter | None = None

    async def begin(self, schema: pa.Schema, columns: Sequence[ResultColumnType]) -> None:
        self._stream = pa.ipc.new_stream(self._into, with_types(schema, columns))

    async def add(self, batch: pa.RecordBatch) -> None:
        assert self._stream is not None
        if self.full or self._into.tell() + batch.nbytes > self._most:
            self.full = True
            return
        self._stream.write_batch(batch)
        self.rows += batch.num_rows

    async def seal(self) -> None:
        assert self._stream is not None
        self._stream.close()

    async def publish(self, facts: ResultMetadata) -> Response:
        body = self._into.getvalue()
        return Response(body, media_type=ARROW_STREAM.encode(), headers=_headers(facts, self.rows))

    async def discard(self) -> None:
        self._into.close()


def with_types(schema: pa.Schema, columns: Sequence[ResultColumnType]) -> pa.Schema:
    """The schema with the engine's types in its fields: several of them share one Arrow type."""
    return pa.schema(
        [
            field.with_metadata({TYPE_FIELD: column.name})
            for field, column in zip(schema, columns, strict=True)
        ]
    )


def _headers(facts: ResultMetadata, rows: int) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (QUERY_ID_HEADER.lower().encode(), str(facts.query_id).encode()),
        (ROW_COUNT_HEADER.lower().encode(), str(rows).encode()),
        (TRUNCATED_HEADER.lower().encode(), b"true" if facts.truncated else b"false"),
    )


def wants_arrow(accept: str | None) -> bool:
    """JSON is the default; Arrow is chosen if the header names it and doesn't weigh it lower than JSON."""
    weights = {"application/json": 0.0, ARROW_STREAM: 0.0}
    for part in (accept or "").split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        if name in weights:
            weights[name] = max(weights[name], _weight(parameters))
    return weights[ARROW_STREAM] > 0 and weights[ARROW_STREAM] >= weights["application/json"]


def _weight(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def encode_rows(batch: pa.RecordBatch, columns: Sequence[ResultColumnType]) -> bytes:
    """The rows as JSON arrays with commas between them; ``columns`` are the engine's types."""
    return _encode(plain_rows(batch, columns))[1:-1]


def plain_rows(batch: pa.RecordBatch, columns: Sequence[ResultColumnType]) -> list[tuple[Any, ...]]:
    values = [plain_values(batch.column(at), column) for at, column in enumerate(columns)]
    return list(zip(*values, strict=True))


def encode_row(row: tuple[Any, ...]) -> bytes:
    return _encode(row)


def plain_values(array: pa.Array, column: ResultColumnType) -> ColumnValues:
    """``column`` is the engine's type: several of them share one Arrow type."""
    kind = array.type
    for applies, convert in _RULES:
        if applies(kind):
            return convert(array, column)
    return _listed(array)


def _listed(array: pa.Array) -> ColumnValues:
    """In pieces, since ``to_pylist`` holds the interpreter lock and a single row may have millions of values."""
    if len(array) <= _AT_ONCE:
        values: ColumnValues = array.to_pylist()
        return values
    values = []
    for start in range(0, len(array), _AT_ONCE):
        values += array.slice(start, _AT_ONCE).to_pylist()
    return values


def _texts(array: pa.Array, column: ResultColumnType) -> ColumnValues:
    match column.kind:
        case "hugeint" | "uhugeint" | "bignum":
            return [None if text is None else _number(text) for text in _listed(array)]
        case "time" | "time_ns":
            digits = _FRACTION_DIGITS[column.kind]
            return [None if text is None else _clock(text, digits) for text in _listed(array)]
        case _:
            return _listed(array)


def _number(text: str) -> msgspec.Raw:
    """All digits as they are: Python parses only a few thousand of them."""
    if not _WHOLE.fullmatch(text):
        raise ValueError("not a whole number")
    return msgspec.Raw(text.encode())


def _clock(text: str, digits: int) -> str:
    whole, point, fraction = text.partition(".")
    return f"{whole}.{fraction.ljust(digits, '0')}" if point else whole


def _decimals(array: pa.Array, _: ResultColumnType) -> ColumnValues:
    """With all digits of the scale: Arrow writes zero and small numbers with an exponent."""
    texts = _listed(pc.cast(array, pa.string()))
    return [text if text is None or "E" not in text else f"{Decimal(text):f}" for text in texts]


def _bytes(array: pa.Array, _: ResultColumnType) -> ColumnValues:
    return [None if value is None else f"0x{value.hex()}" for value in _listed(array)]


def _timestamps(array: pa.Array, _: ResultColumnType) -> ColumnValues:
    zone = "Z" if array.type.tz else ""
    day = _DAY_SECONDS * _PER_SECOND[array.type.unit]
    numbers = array.cast(pa.int64())
    if not _usual(numbers, _FIRST_DAY * day, _LAST_DAY * day - 1, _FOREVER):
        return [None if each is None else _instant(each, array.type) for each in _listed(numbers)]
    text = _trimmed(pc.cast(array.cast(pa.timestamp(array.type.unit)), pa.string()))
    return _listed(
        pc.binary_join_element_wise(pc.replace_substring(text, " ", "T", max_replacements=1), zone, "")
    )


def _dates(array: pa.Array, _: ResultColumnType) -> ColumnValues:
    numbers = array.cast(pa.int32())
    if not _usual(numbers, _FIRST_DAY, _LAST_DAY - 1, _FOREVER_DAY):
        return [
            None if each is None else _endless(each, _FOREVER_DAY) or _day(each) for each in _listed(numbers)
        ]
    return _listed(pc.cast(array, pa.string()))


def _usual(numbers: pa.Array, first: int, last: int, forever: int) -> bool:
    """Whether all are finite and in the years 1 to 9999, which Arrow formats as ISO 8601."""
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
        # The engine's own format, which it also parses.
        return f"{day} {clock}{'+00' if kind.tz else ''}"
    return f"{day}T{clock}{'Z' if kind.tz else ''}"


def _day(days: int) -> str:
    """The date in the Gregorian calendar without bounds, computed by eras of 400 years that begin in March."""
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


def _times(array: pa.Array, _: ResultColumnType) -> ColumnValues:
    return _listed(_trimmed(pc.cast(array, pa.string())))


def _trimmed(text: pa.Array) -> pa.Array:
    """Without a fraction of zeros."""
    return pc.replace_substring_regex(text, r"\.0+$", "")


def _lists(array: pa.Array, column: ResultColumnType) -> ColumnValues:
    """Converts the values of all lists at once, then splits them. A null list has none of them."""
    values = plain_values(array.flatten(), _inner(column, 0))
    lengths = _listed(pc.list_value_length(array))
    found, at = [], 0
    for length in lengths:
        found.append(None if length is None else values[at : at + length])
        at += length or 0
    return found


def _structs(array: pa.Array, column: ResultColumnType) -> ColumnValues:
    fields = [array.type.field(at).name for at in range(array.type.num_fields)]
    # ``flatten`` applies the struct's own nulls to its fields; ``field`` doesn't.
    columns = [plain_values(each, _inner(column, at)) for at, each in enumerate(array.flatten())]
    there = _listed(array.is_valid())
    rows = zip(*columns, strict=True) if columns else iter([()] * len(there))
    return [
        dict(zip(fields, row, strict=True)) if valid else None for valid, row in zip(there, rows, strict=True)
    ]


def _maps(array: pa.Array, column: ResultColumnType) -> ColumnValues:
    pair = pa.struct([("k", array.type.key_type), ("v", array.type.item_type)])
    pairs = _lists(
        array.cast(pa.list_(pair)),
        ResultColumnType("", "list", (ResultColumnType("", "struct", column.inner),)),
    )
    return [None if each is None else [[pair["k"], pair["v"]] for pair in each] for each in pairs]


def _unions(array: pa.Array, column: ResultColumnType) -> ColumnValues:
    # The engine makes sparse unions: every member has a value for every row.
    members = [plain_values(array.field(at), _inner(column, at)) for at in range(array.type.num_fields)]
    return [members[code][at] for at, code in enumerate(_listed(array.type_codes))]


def _inner(column: ResultColumnType, at: int) -> ResultColumnType:
    return column.inner[at] if at < len(column.inner) else _PLAIN


def _dictionaries(array: pa.Array, column: ResultColumnType) -> ColumnValues:
    return plain_values(array.dictionary_decode(), column)


def _extensions(array: pa.Array, column: ResultColumnType) -> ColumnValues:
    return plain_values(array.storage, column)


def _is_list(kind: pa.DataType) -> bool:
    return bool(is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(is_.is_string(kind) or is_.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind))


_RULES: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, ResultColumnType], ColumnValues]], ...
] = (
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
