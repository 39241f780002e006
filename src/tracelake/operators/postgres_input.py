"""Inputs and own outputs in Postgres as Arrow tables: what is committed, cut to scope and ``where``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pyarrow as pa
from psycopg import sql

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.operators.data_database import DataDatabase
from tracelake.operators.inputs import BLOCK_COLUMN, Input
from tracelake.operators.postgres_scan import (
    PostgresScan,
    copied,
    open_scan,
    reading_errors,
    select_list,
    stored_columns,
    table_of,
)


def read_postgres_arrow(source: Input, spans: Sequence[BlockRange] | None = None) -> pa.Table:
    """All rows in this process' memory; a table without columns when nothing has been committed yet. ``spans``
    narrows the scope further."""
    scan = scan_of_input(source, spans)
    if scan is None:
        return pa.table({})
    return pa.Table.from_batches(scan.batches(), scan.schema)


def scan_of_input(
    source: Input, spans: Sequence[BlockRange] | None = None, *, version: UUID | None = None
) -> PostgresScan | None:
    """What is to be read of an input, planned; None when nothing has been committed yet. ``version`` is another
    one than the input's own: that of the hot rows which its files are made of."""
    scan = open_scan(source.data, version or source.dataset_version, predicate=source.predicate)
    if scan is None:
        return None
    if version is None:
        scan = replace(scan, cut_by=source.cut_by)
    within = _within(source, spans)
    if within is not None and not scan.has_blocks:
        raise Invalid(
            "InputNotCut",
            f"input {source.name!r} has no column {scan.cut_by}, so it can't be cut to its scope",
        )
    return scan if within is None else scan.only(within)


def read_stored(
    data: DataDatabase, dataset_version: UUID, columns: Sequence[str], start: int, end: int
) -> pa.Table:
    """Columns of a hot table as they are stored, of blocks ``start``–``end``, as of now, in the blocks' order."""
    connection = data.live()
    with reading_errors():
        stored = stored_columns(connection, dataset_version)
    if stored is None:
        return pa.table({name: pa.nulls(0) for name in columns})
    if missing := [name for name in columns if name not in stored.names]:
        raise Invalid("NoSuchColumn", f"there is no column {', '.join(missing)}: {', '.join(stored.names)}")
    schema = pa.schema([stored.field(name) for name in columns])
    block = sql.Identifier(BLOCK_COLUMN)
    query = sql.SQL("SELECT {} FROM {} WHERE {} BETWEEN {} AND {} ORDER BY {}").format(
        select_list(schema),
        sql.Identifier("data", table_of(dataset_version)),
        block,
        sql.Literal(start),
        sql.Literal(end),
        block,
    )
    return pa.Table.from_batches(copied(connection, query, schema), schema)


def _within(source: Input, spans: Sequence[BlockRange] | None) -> list[BlockRange] | None:
    """The blocks to read; None for all."""
    if source.scope is None:
        return None if spans is None else list(spans)
    scope = source.scope.blocks
    if scope is None:
        return []
    if spans is None:
        return [scope]
    return [
        BlockRange(max(span.start, scope.start), min(span.end, scope.end))
        for span in spans
        if span.overlaps(scope)
    ]
