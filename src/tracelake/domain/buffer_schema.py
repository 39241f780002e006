"""The declared schema of a buffered dataset: its identity, its table's columns, and how it may change.

A schema is known by its hash. The order of columns and of the key's columns doesn't count, so a file that was
only rearranged declares the same schema. A deploy may add columns and nothing else: rows that were written
under the old schema are rows of the new one, with nulls where they had nothing to say.

Beside the declared columns every buffered table has those of the platform, which no record may set. The one
exception is ``revision``: a schema that declares it as bigint says itself which of two records replaces the other.
What a reorg retracts is decided by ``made_at_revision``, which stays the platform's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec

from tracelake.domain.buffer_records import RecordDecoder
from tracelake.domain.dag.model import BufferedDataset, Column, ColumnType

ORG_ID = "org_id"
REVISION = "revision"
BLOCK_NUMBER = "block_number"
"""A schema that declares it says of each row which block it is about; else it is about its task's whole scope."""

CURSOR_COLUMN = "position"
"""What ``after`` and ``upto`` of a buffered input count: it rises with every insert, replacement and retraction."""

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


class BufferSchema(msgspec.Struct, frozen=True):
    """On the wire ``{columns: [{name, type}], unique: [name]}``."""

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
        """Compiled once per schema. ``org_id`` is the installation's: records needn't say it, nor can they say
        another."""
        return _decoder(self, org_id)


@lru_cache(maxsize=256)
def _decoder(schema: BufferSchema, org_id: str) -> RecordDecoder:
    own = {ORG_ID: org_id} if schema.column(ORG_ID) is not None else {}
    return RecordDecoder(schema.columns, schema.unique, own)


Problem = tuple[tuple[str, ...], str]
"""A path below ``schema`` and what is wrong there."""


def schema_problems(schema: BufferSchema) -> Iterator[Problem]:
    """What is wrong with a schema on its own, beyond its names and types being readable."""
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
        yield ("unique",), "revision can't be in unique: it says which of two records with the same key stays"


def additive_problems(old: BufferSchema, new: BufferSchema) -> Iterator[Problem]:
    """Why a dataset that has the old schema can't get the new one; nothing when only columns were added."""
    for was in old.columns:
        now = new.column(was.name)
        if now is None:
            yield ("columns",), f"column {was.name} can't be removed: a deploy may only add columns"
        elif now.type is not was.type:
            change = f"from {was.type.value} to {now.type.value}"
            yield ("columns", was.name), f"the type of {was.name} can't change {change}"
    if set(old.unique) != set(new.unique):
        yield ("unique",), f"the key can't change from {_key(old)} to {_key(new)}"
    elif old.column(REVISION) is None and new.column(REVISION) is not None:
        yield ("columns", REVISION), "revision can't be added later: rows have the platform's"


def added_columns(old: BufferSchema, new: BufferSchema) -> tuple[Column, ...]:
    return tuple(column for column in new.columns if old.column(column.name) is None)


def _key(schema: BufferSchema) -> str:
    return f"({', '.join(schema.unique)})"
