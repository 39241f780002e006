"""Inputs in Postgres as Spark DataFrames: executors read ranges of blocks by COPY, all in the attempt's snapshot.

The driver only plans: how the blocks are split follows from where the rows are and how many there are.
The snapshot is held by the operator process; a DataFrame that is computed after the attempt's end finds it gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from psycopg import sql

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict
from tracelake.operators.inputs import Input
from tracelake.operators.postgres_input import scan_of_input
from tracelake.operators.postgres_scan import PostgresScan, reading_errors

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import DataFrame, SparkSession

_ROWS_PER_TASK = 50_000
_MAX_TASKS = 1000


def read_postgres_dataframe(
    source: Input, spark: SparkSession, spans: Sequence[BlockRange] | None = None
) -> DataFrame:
    """``spans`` narrows the scope further."""
    scan = scan_of_input(source, spans)
    if scan is None:
        raise Conflict("InputEmpty", f"nothing has been committed to input {source.name!r} yet")
    return dataframe_of(scan, spark, splits(scan, source.data.snapshot().connection))


def dataframe_of(scan: PostgresScan, spark: SparkSession, parts: Sequence[PostgresScan]) -> DataFrame:
    """The parts of a scan, each read by a task of its own."""
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


def splits(
    scan: PostgresScan, connection: psycopg.Connection, rows_per_task: int = _ROWS_PER_TASK
) -> list[PostgresScan]:
    """The scan in parts of about as many rows, by ranges of what it is cut by; no parts when there are no rows."""
    if not scan.has_blocks:
        return [scan]
    # Counted, as the planner knows nothing of rows that came a moment ago; it costs little beside reading them.
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
    spans = [hull] if scan.spans is None else [cut for span in scan.spans if (cut := _common(span, hull))]
    tasks = max(1, min(_MAX_TASKS, -(-rows // rows_per_task)))
    return [scan.only(part) for part in cut_evenly(spans, tasks)]


def cut_evenly(spans: Sequence[BlockRange], parts: int) -> list[list[BlockRange]]:
    """As many blocks for each part; fewer parts when there aren't that many blocks."""
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
