"""``publish``: outputs under a name, and buffered datasets with their schema."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tracelake.domain.dag.fields import Fields, shown
from tracelake.domain.dag.job_fields import DATASET_NAME, read_job_output
from tracelake.domain.dag.model import BufferedDataset, Column, ColumnType, PublishedOutput, Storage
from tracelake.domain.dag.problems import Path

THE_ENGINES = ("duckdb_", "pg_", "pragma_", "sqlite_")
"""How the query engine's own relations are called: a dataset of such a name couldn't be queried."""
COLUMN_NAME = re.compile(r"^[a-z_][a-z0-9_]{0,62}\Z")
MAX_COLUMNS = 500

BUFFERED_FIELDS = frozenset({"storage", "write_mode", "schema"})
PUBLISH_FIELDS = BUFFERED_FIELDS | {"from"}


class WriteMode(StrEnum):
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True)
class PublishDraft:
    path: Path
    entry: PublishedOutput | BufferedDataset


def read_publish(top: Fields) -> list[PublishDraft]:
    publish = top.nested("publish", _AnyName())
    if publish is None:
        return []
    drafts = []
    for name, _ in list(top.entries("publish")):
        if not DATASET_NAME.match(name):
            publish.wrong(name, f"dataset names match {shown(DATASET_NAME)}")
        if name.startswith(THE_ENGINES):
            publish.wrong(name, f"dataset names don't begin with {', '.join(THE_ENGINES)}")
        entry = publish.nested(name, PUBLISH_FIELDS)
        if entry is None:
            publish.wrong(name, "needs {from: {job, output}} or a buffered dataset's schema")
            continue
        found = _read_from(name, entry) if entry.has("from") else _read_buffered(name, entry)
        if found is not None:
            drafts.append(PublishDraft(entry.path, found))
    return drafts


class _AnyName(frozenset[str]):
    """Every key is known: the keys of ``publish`` and of ``columns`` are the author's names."""

    def __contains__(self, item: object) -> bool:
        return True


def _read_from(name: str, entry: Fields) -> PublishedOutput | None:
    for field in sorted(BUFFERED_FIELDS):
        if entry.has(field):
            entry.wrong(field, "can't stand beside from: the job's output says it already")
    origin = entry.nested("from", {"job", "output"})
    source = read_job_output(origin) if origin is not None else None
    return PublishedOutput(name, source.job, source.output) if source is not None else None


def _read_buffered(name: str, entry: Fields) -> BufferedDataset:
    storage = entry.choice("storage", Storage)
    if storage is None:
        entry.wrong("storage", "is required: postgres (or give from: {job, output})")
    elif storage is not Storage.POSTGRES:
        entry.wrong("storage", "a buffered dataset is stored in postgres")
    if entry.choice("write_mode", WriteMode) is None:
        entry.wrong("write_mode", "is required: buffered")
    schema = entry.nested("schema", {"columns", "unique"})
    if schema is None:
        entry.wrong("schema", "is required: {columns, unique}")
        return BufferedDataset(name, (), ())
    columns = _read_columns(schema)
    unique = schema.strings("unique")
    if not unique:
        schema.wrong("unique", "is required: the columns that make a record the same record")
    for column in unique:
        if column not in {known.name for known in columns}:
            schema.wrong("unique", f"{column!r} is not among the columns")
    return BufferedDataset(name, columns, unique)


def _read_columns(schema: Fields) -> tuple[Column, ...]:
    columns = schema.nested("columns", _AnyName())
    if columns is None:
        schema.wrong("columns", "is required: a map of names to types")
        return ()
    found = []
    for name, _ in list(schema.entries("columns")):
        if not COLUMN_NAME.match(name):
            columns.wrong(name, f"column names match {shown(COLUMN_NAME)}")
        if not columns.has(name):
            columns.wrong(name, "needs a type")
        found.append(Column(name, columns.choice(name, ColumnType) or ColumnType.TEXT))
    if not found or len(found) > MAX_COLUMNS:
        schema.wrong("columns", f"must be 1 to {MAX_COLUMNS} columns")
    return tuple(found)
