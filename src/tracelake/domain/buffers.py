"""The declared schema of a buffered dataset: its identity, its table's columns, how it may change, and its records.

A schema is identified by its hash. The order of columns and of the key's columns doesn't count, so a rearranged
file declares the same schema. A deploy may only add columns: rows that were written under the old schema are rows
of the new one, with nulls in the new columns.

Besides the declared columns every buffered table has those of the platform, which no record may set. The one
exception is ``revision``: in a schema that declares it as bigint, the record with the higher one replaces the
other. Retractions after a reorg go by ``made_at_revision``, which stays the platform's.

Records are checked at native speed: a schema becomes a struct type, and msgspec checks a whole JSON array against
it while it decodes. Only a batch that doesn't fit is decoded again record by record, to name the fields at fault.
Values that types can't exclude (numbers too large for Postgres, NUL in a text) are searched only where they can
occur.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from types import GenericAlias
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from tracelake.domain.dag.model import BufferedDataset, Column, ColumnType
from tracelake.domain.errors import Invalid
from tracelake.domain.literals import read_integer
from tracelake.domain.where import Predicate, can_compare, compared_literals, literal_text

ORG_ID = "org_id"
REVISION = "revision"
#: The block of each row, if the schema declares it; otherwise a row belongs to its task's whole scope.
BLOCK_NUMBER = "block_number"
#: ``after`` and ``upto`` of a buffered input count it. It rises with every insert, replacement and retraction.
CURSOR_COLUMN = "position"
PLATFORM_COLUMNS: Mapping[str, str] = {
    CURSOR_COLUMN: "bigint",
    "producer": "text",
    "scope_start": "bigint",
    "scope_end": "bigint",
    REVISION: "bigint",
    "made_at_revision": "bigint",
    "written_at": "timestamptz",
    "retracted_at": "timestamptz",
}
POSTGRES_TYPES: Mapping[ColumnType, str] = {
    **{known: known.value for known in ColumnType},
    ColumnType.DOUBLE: "double precision",
}
NOT_IN_KEYS = frozenset({ColumnType.JSONB, ColumnType.DOUBLE})
#: A path below ``schema`` and a message.
SchemaProblem = tuple[tuple[str, ...], str]
MAX_PROBLEMS = 20
#: Below the limit of an entry in a btree index.
MAX_KEY_BYTES = 2400
_MAX_INTEGER_DIGITS, _MAX_FRACTION_DIGITS = 131_072, 16_383
_NUL = "\\u0000"
_PLACE = re.compile(r" - at `\$(?:\[\.\.\.\]|\[\d+\])?(?:\.(?P<field>[^`]*))?`$")
_UNFIT_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `(?P<field>[^`]*)`")
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
_READ_AS_TEXT = frozenset({ColumnType.NUMERIC, ColumnType.UUID, ColumnType.JSONB})
_PYTHON_TYPES: Mapping[ColumnType, type] = {
    ColumnType.TEXT: str,
    ColumnType.BIGINT: int,
    ColumnType.INTEGER: int,
    ColumnType.NUMERIC: Decimal,
    ColumnType.BOOLEAN: bool,
    ColumnType.TIMESTAMPTZ: datetime,
    ColumnType.BYTEA: bytes,
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


class BufferSchema(msgspec.Struct, frozen=True):
    """Its JSON is ``{columns: [{name, type}], unique: [name]}``."""

    columns: tuple[Column, ...]
    unique: tuple[str, ...]

    @classmethod
    def of(cls, dataset: BufferedDataset) -> BufferSchema:
        return cls(dataset.columns, dataset.unique)

    @property
    def hash(self) -> str:
        """``sha256:…`` of ``{"columns":{name:type},"unique":[name]}``, compact, everything sorted by name."""
        identity = {
            "columns": {column.name: column.type.value for column in self.columns},
            "unique": sorted(self.unique),
        }
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)

    def decoder(self, org_id: str) -> RecordDecoder:
        """Compiled once per schema. ``org_id`` is the installation's: records may leave it out, and can't have
        another."""
        return _decoder(self, org_id)


@lru_cache(maxsize=256)
def _decoder(schema: BufferSchema, org_id: str) -> RecordDecoder:
    own = {ORG_ID: org_id} if schema.column(ORG_ID) is not None else {}
    return RecordDecoder(schema.columns, schema.unique, own)


def literal_problems(
    tree: Predicate, types: Mapping[str, ColumnType], *, of_input: bool = False
) -> Iterator[str]:
    """Comparisons of a predicate that are unknown for every row, since the literal is none of the column's type.
    ``of_input``: on rows as jobs read them, for which some types are text."""
    for column, literal in compared_literals(tree):
        kind = types.get(column)
        if kind is not None and of_input and kind in _READ_AS_TEXT and not isinstance(literal, str):
            yield f"{column} is {kind.value}, which an input has as text: {literal_text(literal)} needs quotes"
            continue
        # JSON has values of several types, and other columns are refused elsewhere or null.
        if kind is None or kind is ColumnType.JSONB:
            continue
        known = can_compare(_PYTHON_TYPES[kind], literal)
        if kind is ColumnType.INTEGER and isinstance(literal, str):
            known = read_integer(literal, -(2**31), 2**31 - 1) is not None
        if not known:
            article = "an" if kind is ColumnType.INTEGER else "a"
            why = f"{literal_text(literal)} can't be read as {article} {kind.value}: no row would match"
            yield f"{column} is {kind.value}, and {why}"


def schema_problems(schema: BufferSchema) -> Iterator[SchemaProblem]:
    """Problems of a schema by itself; its names and types are already checked."""
    for column in schema.columns:
        path = ("columns", column.name)
        if column.name == REVISION and column.type is not ColumnType.BIGINT:
            yield path, "revision is bigint: the record with the higher one replaces the other"
        elif column.name in PLATFORM_COLUMNS and column.name != REVISION:
            yield path, f"{column.name} is one of the platform's own columns"
        elif column.name == ORG_ID and column.type not in (ColumnType.TEXT, ColumnType.UUID):
            yield path, "org_id is text or uuid: the platform fills it in"
        elif column.name == BLOCK_NUMBER and column.type is not ColumnType.BIGINT:
            yield path, "block_number is bigint: the block that a row is about"
        elif column.name in schema.unique and column.type in NOT_IN_KEYS:
            yield path, f"a column of type {column.type.value} can't be in unique"
    if REVISION in schema.unique:
        yield (
            ("unique",),
            "revision can't be in unique: it decides which of two records with the same key stays",
        )


def additive_problems(old: BufferSchema, new: BufferSchema) -> Iterator[SchemaProblem]:
    """Why a dataset with the old schema can't get the new one; empty when only columns were added."""
    for was in old.columns:
        now = new.column(was.name)
        if now is None:
            yield ("columns",), f"column {was.name} can't be removed: a deploy may only add columns"
        elif now.type is not was.type:
            change = f"from {was.type.value} to {now.type.value}"
            yield ("columns", was.name), f"the type of {was.name} can't change {change}"
    # The order of the key's columns doesn't count, as in the hash.
    if set(old.unique) != set(new.unique):
        yield ("unique",), f"the key can't change from {_key(old)} to {_key(new)}"
    elif old.column(REVISION) is None and new.column(REVISION) is not None:
        yield ("columns", REVISION), "revision can't be added later: rows have the platform's"


def added_columns(old: BufferSchema, new: BufferSchema) -> tuple[Column, ...]:
    return tuple(column for column in new.columns if old.column(column.name) is None)


def _key(schema: BufferSchema) -> str:
    return f"({', '.join(schema.unique)})"


class RecordProblem(msgspec.Struct, frozen=True):
    """A problem of a batch: the record's place and the field, or null if it concerns the whole batch or record."""

    record: int | None
    field: str | None
    message: str


class BadRecords(Invalid):
    """A batch doesn't fit its dataset's schema; the error has the first ``MAX_PROBLEMS`` problems."""

    def __init__(self, problems: Sequence[RecordProblem]) -> None:
        first = problems[0]
        place = "" if first.record is None else f"record {first.record}"
        if first.field is not None:
            place += f", field {first.field}"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__("BadRecords", f"{place}: {first.message}{more}" if place else first.message)
        self.problems = tuple(problems)

    def moved(self, by: int) -> BadRecords:
        """The same problems for records that are ``by`` places further on."""
        return BadRecords(
            [
                RecordProblem(None if each.record is None else each.record + by, each.field, each.message)
                for each in self.problems
            ]
        )


class RecordDecoder:
    """Reads a JSON array of records; made by ``BufferSchema.decoder``.

    ``rows`` returns tuples in the order of the schema's columns, with None for fields that are missing or null:
    text and bytea (``0x…``) as str, bigint and integer as int, numeric as Decimal, boolean as bool, timestamptz as
    an aware datetime, double as float, uuid as UUID, jsonb as its JSON text. ``org_id`` is always filled in.
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
        """The number of records. Raises ``BadRecords`` when they don't fit."""
        return len(self._decode(records))

    def check_in_portions(self, records: str, size: int = 1000) -> Iterator[int]:
        """The same for many records, ``size`` at a time, so that the caller can do other work in between."""
        try:
            raws = msgspec.json.decode(records, type=list[msgspec.Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRecords(self._explain(records, error)) from None
        for start in range(0, len(raws), size):
            # Raw pieces, not decoded values: numbers keep their digits.
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
        # JSON can only escape a NUL, so without this text in the batch no value has one.
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
            return RecordProblem(place, field, "is filled in by the platform, and has another value there")
        expected = _READABLE[self._columns[field].type]
        limit = re.search(r"length <= (\d+)", text)
        if limit is not None:
            expected += f" of at most {limit[1]} characters, as part of the key"
        return RecordProblem(place, field, f"must be {expected}")


def _attribute(place: int) -> str:
    """A safe attribute name: a column may have the name of a Python keyword."""
    return f"c{place}"


def _record_type(
    columns: Sequence[Column], unique: frozenset[str], own: Mapping[str, str]
) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    long = [column for column in columns if column.name in unique - set(own) and column.type in _LONG]
    # The index limits the whole key, so its long columns share the room.
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
        # There are many records and they can't form cycles.
        gc=False,
    )


def _key_type(kind: ColumnType, share: int) -> Any:
    match kind:
        case ColumnType.TEXT:
            # A character takes up to four bytes in UTF-8.
            return Annotated[str, Meta(max_length=share // 4)]
        case ColumnType.BYTEA:
            # Two hex digits for each byte, after the 0x.
            return Annotated[_TYPES[kind], Meta(max_length=2 + share // 2 * 2)]
        case _:
            return _TYPES[kind]


def _of_type(
    columns: Sequence[Column], attributes: Mapping[str, str], kind: ColumnType
) -> list[tuple[str, str]]:
    return [(column.name, attributes[column.name]) for column in columns if column.type is kind]


def _json_text(raw: msgspec.Raw | None) -> str | None:
    text = None if raw is None else bytes(raw).decode()
    # A JSON null means that there is no value, as for the other types.
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
    # Without recursion: the nesting is the client's choice.
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
