"""Inputs with hot rows: tables in Postgres, and compacted datasets read as one table of files and hot rows.

A compacted dataset is read without duplicates and without gaps, whatever the compaction is doing: the snapshot of
the hot rows is taken first, the list of committed files after it. A block that is in a listed file is read from
there, and its hot rows are skipped; any other block was hot when the snapshot was taken, since rows are never
removed before the files that hold them are committed. An invalidation in between is refused by the list, or by the
completion.

For Spark, the driver only plans: it splits the blocks by where the rows are and how many there are, and executors
read their ranges by COPY, all in the attempt's snapshot. The operator process holds the snapshot, so a DataFrame
that is computed after the attempt's end fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.errors import Conflict, Invalid
from tracelake.tables.arrow import read_files
from tracelake.tables.data_database import SQL, DataDatabase
from tracelake.tables.postgres_scan import (
    PostgresScan,
    copy_query,
    hot_table_name,
    open_scan,
    reading_errors,
    select_list,
    stored_columns,
)
from tracelake.tables.scope import BLOCK_COLUMN, ReadRequest, ReadScope

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import DataFrame, SparkSession

_ROWS_PER_TASK = 50_000
_MAX_TASKS = 1000


def read_both_arrow(request: ReadRequest, hot: UUID) -> pa.Table:
    files = list_after_snapshot(request)
    cold = read_files(request, files)
    spans = blocks_without_files(request.scope, files)
    scan = scan_of_request(request, spans, version=hot) if spans else None
    if scan is None:
        return cold
    rows = pa.Table.from_batches(scan.batches(), scan.schema)
    # Both parts need the same columns in the same order and types to be one table.
    return pa.concat_tables([cold.select(rows.column_names).cast(rows.schema), rows]) if files else rows


def list_after_snapshot(request: ReadRequest) -> list[InputFile]:
    """The committed files, listed after the snapshot was taken. If files hold the whole scope, no hot rows and so
    no snapshot are needed: then the data database isn't asked at all."""
    # Without a scope any block may still be hot, so the snapshot is always needed.
    if request.scope is not None and not blocks_without_files(request.scope, files := request.files()):
        return files
    # In this order: a file that is committed in between is listed then, and its hot rows are skipped.
    request.data.snapshot()
    return request.files()


def blocks_without_files(scope: ReadScope | None, cold: Iterable[InputFile | BlockRange]) -> list[BlockRange]:
    """The blocks of the scope that no committed file or range holds, as few ranges as possible."""
    start, end = (0, MAX_BLOCK) if scope is None else (scope.start, scope.end)
    left = []
    # A set: all files of a partition have its range.
    for held in sorted({(one.start, one.end) for one in cold}):
        if held[0] > start:
            left.append((start, min(held[0] - 1, end)))
        start = max(start, held[1] + 1)
    left.append((start, end))
    return [BlockRange(first, last) for first, last in left if first <= last]


def read_postgres_arrow(request: ReadRequest, spans: Sequence[BlockRange] | None = None) -> pa.Table:
    """All rows in this process' memory; a table without columns when nothing has been committed yet. ``spans``
    narrows the scope further."""
    scan = scan_of_request(request, spans)
    if scan is None:
        return pa.table({})
    return pa.Table.from_batches(scan.batches(), scan.schema)


def scan_of_request(
    request: ReadRequest, spans: Sequence[BlockRange] | None = None, *, version: UUID | None = None
) -> PostgresScan | None:
    """Plan the scan of a request; None when nothing has been committed yet. ``version`` replaces the request's own:
    it is the version of the hot rows that the files are made of."""
    scan = open_scan(request.data, version or request.dataset_version, predicate=request.predicate)
    if scan is None:
        return None
    # Hot rows of a compacted dataset are always cut by block: its files are.
    if version is None:
        scan = replace(scan, cut_by=request.cut_by)
    within = _within(request, spans)
    if within is not None and not scan.has_blocks:
        raise Invalid(
            "InputNotCut",
            f"input {request.name!r} has no column {scan.cut_by}, so it can't be cut to its scope",
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
        sql.Identifier("data", hot_table_name(dataset_version)),
        block,
        sql.Literal(start),
        sql.Literal(end),
        block,
    )
    return pa.Table.from_batches(copy_query(connection, query, schema), schema)


def _within(request: ReadRequest, spans: Sequence[BlockRange] | None) -> list[BlockRange] | None:
    """The blocks to read; None for all."""
    if request.scope is None:
        return None if spans is None else list(spans)
    scope = request.scope.blocks
    if scope is None:
        return []
    if spans is None:
        return [scope]
    return [
        BlockRange(max(span.start, scope.start), min(span.end, scope.end))
        for span in spans
        if span.overlaps(scope)
    ]


def stored_span(data: DataDatabase, version: UUID) -> BlockRange | None:
    """From the first to the last block with rows, now; None when there are no rows, or no table yet."""
    query = sql.SQL(SQL.span).format(table=sql.Identifier("data", hot_table_name(version)))
    with reading_errors():
        try:
            # The first commit makes the table.
            row = data.live().execute(query).fetchone()
        except psycopg.errors.UndefinedTable:
            return None
    return None if row is None or row[0] is None else BlockRange(row[0], row[1])


def read_postgres_dataframe(
    request: ReadRequest, spark: SparkSession, spans: Sequence[BlockRange] | None = None
) -> DataFrame:
    """``spans`` narrows the scope further."""
    scan = scan_of_request(request, spans)
    if scan is None:
        raise Conflict("InputEmpty", f"nothing has been committed to input {request.name!r} yet")
    return dataframe_of(scan, spark, split_scan(scan, request.data.snapshot().connection))


def dataframe_of(scan: PostgresScan, spark: SparkSession, parts: Sequence[PostgresScan]) -> DataFrame:
    """The parts of a scan, each read by a task of its own."""
    # A worker without Spark uses this module too.
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(scan.schema)
    if not parts:
        return spark.createDataFrame([], schema)
    tasks = spark.range(0, len(parts), 1, len(parts))
    return tasks.mapInArrow(partial(read_parts, tuple(parts)), schema)


def read_parts(parts: Sequence[PostgresScan], numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in the executors."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield from parts[number].batches()


def split_scan(
    scan: PostgresScan, connection: psycopg.Connection, rows_per_task: int = _ROWS_PER_TASK
) -> list[PostgresScan]:
    """The scan in parts of about ``rows_per_task`` rows, by ranges of ``cut_by``; none when there are no rows."""
    if not scan.has_blocks:
        return [scan]
    # Counted, since the planner's estimate misses rows that were just committed; it is cheap beside reading them.
    query = sql.SQL("SELECT min({0}), max({0}), count(*) FROM {1}{2}").format(
        sql.Identifier(scan.cut_by), sql.Identifier("data", scan.table), scan.conditions()
    )
    with reading_errors():
        found = connection.execute(query).fetchone()
    assert found is not None
    lowest, highest, rows = found
    if lowest is None:
        return []
    hull = BlockRange(lowest, highest)
    # Spans may reach far beyond the stored blocks, and would leave most tasks without rows.
    spans = [hull] if scan.spans is None else [cut for span in scan.spans if (cut := _common(span, hull))]
    tasks = max(1, min(_MAX_TASKS, -(-rows // rows_per_task)))
    return [scan.only(part) for part in cut_evenly(spans, tasks)]


def cut_evenly(spans: Sequence[BlockRange], parts: int) -> list[list[BlockRange]]:
    """The same number of blocks for each part; fewer parts when there aren't that many blocks."""
    total = sum(span.end - span.start + 1 for span in spans)
    size = max(1, -(-total // parts))
    made: list[list[BlockRange]] = []
    room = 0
    for span in spans:
        start = span.start
        while start <= span.end:
            if room == 0:
                made.append([])
                room = size
            end = min(span.end, start + room - 1)
            made[-1].append(BlockRange(start, end))
            room -= end - start + 1
            start = end + 1
    return made


def _common(one: BlockRange, other: BlockRange) -> BlockRange | None:
    if not one.overlaps(other):
        return None
    return BlockRange(max(one.start, other.start), min(one.end, other.end))
