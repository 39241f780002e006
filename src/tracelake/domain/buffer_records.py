"""Records of a buffered dataset, checked at native speed.

A schema becomes a struct type, and msgspec checks a whole JSON array against it while it decodes. Only a batch that
doesn't fit is looked at record by record, to say of each what is wrong with which field. What the types can't say
(numbers that Postgres has no place for, NUL in a text) is looked for only where it can occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import islice
from types import GenericAlias
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from tracelake.domain.dag.model import Column, ColumnType
from tracelake.domain.errors import Invalid

MAX_PROBLEMS = 20
MAX_KEY_BYTES = 2400
"""What an entry of a btree index may hold, with room to spare."""

_NUL = "\\u0000"
_PLACE = re.compile(r" - at `\$(?:\[\.\.\.\]|\[\d+\])?(?:\.(?P<field>[^`]*))?`$")
_UNFIT_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `(?P<field>[^`]*)`")
_MAX_INTEGER_DIGITS, _MAX_FRACTION_DIGITS = 131_072, 16_383

_INTEGER = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_BIGINT = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_TIMESTAMPTZ = Annotated[datetime, Meta(tz=True)]
_TYPES: Mapping[ColumnType, Any] = {
    ColumnType.TEXT: str,
    ColumnType.BIGINT: _BIGINT,
    ColumnType.INTEGER: _INTEGER,
    ColumnType.NUMERIC: Decimal,
    ColumnType.BOOLEAN: bool,
    ColumnType.TIMESTAMPTZ: _TIMESTAMPTZ,
    ColumnType.BYTEA: Annotated[str, Meta(pattern=r"\A0x(?:[0-9a-fA-F]{2})*\Z")],
    ColumnType.DOUBLE: float,
    ColumnType.UUID: UUID,
}
_LONG = frozenset({ColumnType.TEXT, ColumnType.BYTEA})
_READABLE: Mapping[ColumnType, str] = {
    ColumnType.TEXT: "a string",
    ColumnType.BIGINT: "a whole number of 64 bits",
    ColumnType.INTEGER: "a whole number of 32 bits",
    ColumnType.NUMERIC: "a number, or one written as a string",
    ColumnType.BOOLEAN: "true or false",
    ColumnType.TIMESTAMPTZ: "a time with its zone (RFC 3339)",
    ColumnType.JSONB: "JSON",
    ColumnType.BYTEA: "bytes as a string 0x… of hex digits",
    ColumnType.DOUBLE: "a finite number",
    ColumnType.UUID: "a uuid",
}


class RecordProblem(msgspec.Struct, frozen=True):
    """One thing wrong with a batch: the record's place in it and the field, null where it is about all of it."""

    record: int | None
    field: str | None
    message: str


class BadRecords(Invalid):
    """A batch that doesn't fit its dataset's schema, with the first ``MAX_PROBLEMS`` problems."""

    def __init__(self, problems: Sequence[RecordProblem]) -> None:
        first = problems[0]
        place = "" if first.record is None else f"record {first.record}"
        if first.field is not None:
            place += f", field {first.field}"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__("BadRecords", f"{place}: {first.message}{more}" if place else first.message)
        self.problems = tuple(problems)

    def moved(self, by: int) -> BadRecords:
        """The same of records that stand further back."""
        return BadRecords(
            [
                RecordProblem(None if each.record is None else each.record + by, each.field, each.message)
                for each in self.problems
            ]
        )


class RecordDecoder:
    """Reads a JSON array of records; made by ``BufferSchema.decoder``.

    ``rows`` gives tuples in the order of the schema's columns, with None for what a record left out or said null
    to: text and bytea (``0x…``) as str, bigint and integer as int, numeric as Decimal, boolean as bool,
    timestamptz as an aware datetime, double as float, uuid as UUID, jsonb as its JSON text. ``org_id`` is always
    filled in.
    """

    def __init__(self, columns: Sequence[Column], unique: Sequence[str], own: Mapping[str, str]) -> None:
        self._columns = {column.name: column for column in columns}
        self._own = dict(own)
        record = _record_type(columns, frozenset(unique), own)
        self._all: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(GenericAlias(list, (record,)))
        self._one: msgspec.json.Decoder[Any] = msgspec.json.Decoder(record)
        attributes = {column.name: _attribute(place) for place, column in enumerate(columns)}
        self._texts = _of_type(columns, attributes, ColumnType.TEXT)
        self._json = _of_type(columns, attributes, ColumnType.JSONB)
        self._numerics = _of_type(columns, attributes, ColumnType.NUMERIC)
        self._filled_in = [
            (attributes[name], UUID(text) if self._columns[name].type is ColumnType.UUID else text)
            for name, text in own.items()
        ]

    def check(self, records: str) -> int:
        """How many records there are; ``BadRecords`` when they don't fit."""
        return len(self._decode(records))

    def check_in_portions(self, records: str, size: int = 1000) -> Iterator[int]:
        """The same for many records, ``size`` at a time, for whoever has something else to do in between."""
        try:
            raws = msgspec.json.decode(records, type=list[msgspec.Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRecords(self._explain(records, error)) from None
        for start in range(0, len(raws), size):
            portion = b",".join(raws[start : start + size])
            try:
                yield self.check(f"[{portion.decode()}]")
            except BadRecords as bad:
                raise bad.moved(start) from None

    def rows(self, records: str) -> list[tuple[Any, ...]]:
        found = self._decode(records)
        for attribute, value in self._filled_in:
            for record in found:
                setattr(record, attribute, value)
        for _, attribute in self._json:
            for record in found:
                setattr(record, attribute, _json_text(getattr(record, attribute)))
        return [msgspec.structs.astuple(record) for record in found]

    def _decode(self, records: str) -> list[Any]:
        try:
            found = self._all.decode(records)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRecords(self._explain(records, error)) from None
        if problems := list(islice(self._beyond_types(found, records), MAX_PROBLEMS)):
            raise BadRecords(problems)
        return found

    def _beyond_types(self, found: Sequence[Any], records: str) -> Iterator[RecordProblem]:
        for name, attribute in self._numerics:
            for place, record in enumerate(found):
                if not _fits_numeric(getattr(record, attribute)):
                    yield RecordProblem(place, name, "must be a finite number that Postgres can hold")
        if _NUL not in records:
            return
        for name, attribute in self._texts:
            for place, record in enumerate(found):
                if "\0" in (getattr(record, attribute) or ""):
                    yield RecordProblem(place, name, "can't contain the character NUL")
        for name, attribute in self._json:
            for place, record in enumerate(found):
                raw = getattr(record, attribute)
                if raw is not None and _holds_nul(msgspec.json.decode(raw)):
                    yield RecordProblem(place, name, "can't contain the character NUL")

    def _explain(self, records: str, error: Exception) -> list[RecordProblem]:
        try:
            raws = msgspec.json.decode(records, type=list[msgspec.Raw])
        except msgspec.ValidationError:
            return [RecordProblem(None, None, "records must be an array of objects")]
        except (msgspec.DecodeError, RecursionError):
            return [RecordProblem(None, None, f"records can't be read: {error}")]
        problems = islice(self._each_problem(raws), MAX_PROBLEMS)
        return list(problems) or [RecordProblem(None, None, f"records can't be read: {error}")]

    def _each_problem(self, raws: Sequence[msgspec.Raw]) -> Iterator[RecordProblem]:
        for place, raw in enumerate(raws):
            try:
                self._one.decode(raw)
            except (msgspec.DecodeError, RecursionError) as error:
                yield self._problem(place, str(error))

    def _problem(self, place: int, text: str) -> RecordProblem:
        if missing := _UNFIT_FIELD.match(text):
            field = missing["field"]
            known = field in self._columns
            return RecordProblem(
                place, field, "is required: it is part of the key" if known else "is not in the schema"
            )
        at = _PLACE.search(text)
        field = at["field"] if at is not None else None
        if field is None or field not in self._columns:
            return RecordProblem(place, None, "must be an object" if text.startswith("Expected") else text)
        if field in self._own:
            return RecordProblem(place, field, "is the platform's to fill in, and this is not its value")
        expected = _READABLE[self._columns[field].type]
        limit = re.search(r"length <= (\d+)", text)
        if limit is not None:
            expected += f" of at most {limit[1]} characters, as part of the key"
        return RecordProblem(place, field, f"must be {expected}")


def _attribute(place: int) -> str:
    """Columns may be called anything, Python's own words included."""
    return f"c{place}"


def _record_type(
    columns: Sequence[Column], unique: frozenset[str], own: Mapping[str, str]
) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    long = [column for column in columns if column.name in unique - set(own) and column.type in _LONG]
    share = MAX_KEY_BYTES // max(1, len(long))
    for place, column in enumerate(columns):
        attribute = _attribute(place)
        if column.name in own:
            fields.append((attribute, Literal[own[column.name]] | None, None))
        elif column.type is ColumnType.JSONB:
            fields.append((attribute, msgspec.Raw, None))
        elif column.name in unique:
            fields.append((attribute, _key_type(column.type, share)))
        else:
            fields.append((attribute, _TYPES[column.type] | None, None))
    return msgspec.defstruct(
        "Record",
        fields,
        rename={_attribute(place): column.name for place, column in enumerate(columns)},
        forbid_unknown_fields=True,
        kw_only=True,
        gc=False,
    )


def _key_type(kind: ColumnType, share: int) -> Any:
    match kind:
        case ColumnType.TEXT:
            return Annotated[str, Meta(max_length=share // 4)]
        case ColumnType.BYTEA:
            return Annotated[_TYPES[kind], Meta(max_length=2 + share // 2 * 2)]
        case _:
            return _TYPES[kind]


def _of_type(
    columns: Sequence[Column], attributes: Mapping[str, str], kind: ColumnType
) -> list[tuple[str, str]]:
    return [(column.name, attributes[column.name]) for column in columns if column.type is kind]


def _json_text(raw: msgspec.Raw | None) -> str | None:
    text = None if raw is None else bytes(raw).decode()
    return None if text == "null" else text


def _fits_numeric(value: Decimal | None) -> bool:
    if value is None or value == 0:
        return True
    if not value.is_finite():
        return False
    exponent = value.as_tuple().exponent
    return (
        isinstance(exponent, int)
        and -exponent <= _MAX_FRACTION_DIGITS
        and value.adjusted() < _MAX_INTEGER_DIGITS
    )


def _holds_nul(value: Any) -> bool:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text if "\0" in text:
                return True
            case dict() as fields:
                waiting += [*fields.keys(), *fields.values()]
            case list() as items:
                waiting += items
            case _:
                continue
    return False
