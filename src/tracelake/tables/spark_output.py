"""Parquet outputs of Spark: executors write the files, the operator process receives one small row per file.

Nothing is renamed, and no data passes through the operator process. See ``parquet`` for how rows are cut into
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import functions
from pyspark.sql.pandas.types import to_arrow_schema

from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.domain.errors import Invalid
from tracelake.domain.where_bounds import ColumnBounds
from tracelake.tables.parquet import CELL, ParquetPlan, check_columns, manifest_of, write_cells
from tracelake.tables.stored_types import stored_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_INTEGERS = ("byte", "short", "integer", "long")
_REPORTED = pa.schema(
    [
        ("location", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("content_hash", pa.string()),
        ("min_block", pa.int64()),
        ("max_block", pa.int64()),
        ("columns", pa.string()),
        ("reason", pa.string()),
        ("problem", pa.string()),
    ]
)
_REPORTED_DDL = (
    "location string, rows bigint, bytes bigint, content_hash string, "
    "min_block bigint, max_block bigint, columns string, reason string, problem string"
)


def write_dataframe(
    frame: DataFrame, plan: ParquetPlan, *, sort_by: Sequence[str], verified: str | None
) -> Manifest:
    schema = stored_schema(to_arrow_schema(frame.schema, timezone="UTC"))
    check_columns(schema.names, sort_by)
    placed = _in_cells(frame, plan, sort_by)
    reported = placed.mapInArrow(partial(write_partition, plan), _REPORTED_DDL).toArrow().to_pylist()
    for row in reported:
        if row["problem"] is not None:
            raise Invalid(row["reason"], row["problem"])
    files = [_reported_file(row) for row in reported]
    return manifest_of(files, plan, schema, verified=verified)


def _reported_file(row: dict[str, Any]) -> ManifestFile:
    fields = {name: row[name] for name in ManifestFile.__struct_fields__}
    fields["columns"] = msgspec.json.decode(row["columns"], type=dict[str, ColumnBounds])
    return ManifestFile(**fields)


def write_partition(plan: ParquetPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in the executors. A problem with the rows comes back as a row: an exception would be retried by Spark,
    and reach the operator as text."""
    try:
        for file in write_cells(batches, plan):
            fields = {name: getattr(file, name) for name in file.__struct_fields__}
            fields["columns"] = msgspec.json.encode(file.columns).decode()
            yield pa.RecordBatch.from_pylist([fields], schema=_REPORTED)
    except Invalid as error:
        problem = {"reason": error.reason, "problem": error.message}
        yield pa.RecordBatch.from_pylist([problem], schema=_REPORTED)
        # Spark expects its input to be read to the end.
        for _ in batches:
            continue


def _in_cells(frame: DataFrame, plan: ParquetPlan, sort_by: Sequence[str]) -> DataFrame:
    """One partition per cell, so that the files are the same however many executors there are."""
    order = [functions.col(quoted_name(name)) for name in sort_by]
    if plan.block_column not in frame.columns:
        # Without blocks there is no grid, so all rows go to one file.
        single = frame.withColumn(CELL, functions.lit(0).cast("bigint")).repartition(1)
        return single.sortWithinPartitions(*order) if order else single
    block = quoted_name(plan.block_column)
    kind = frame.schema[plan.block_column].dataType.typeName()
    if kind not in _INTEGERS:
        raise Invalid("InvalidRows", f"{plan.block_column} must be an integer, not {kind}")
    cell = functions.expr(f"CAST({block} AS BIGINT) div {plan.blocks_per_file}")
    marked = frame.withColumn(CELL, cell)
    if plan.cells > 1:
        # A row without a block has no cell; it goes to some task, which refuses it with a clear message.
        number = functions.coalesce(functions.col(CELL) - plan.first_cell, functions.lit(0))
        # ``pmod``: a block outside of the scope must reach a task as well, which refuses it.
        marked = marked.repartitionById(plan.cells, functions.pmod(number, plan.cells).cast("int"))
    else:
        marked = marked.repartition(1)
    return marked.sortWithinPartitions(CELL, *(order or [functions.col(block)]))


def quoted_name(name: str) -> str:
    """A column's name for Spark's parser, whatever characters it holds."""
    return "`" + name.replace("`", "``") + "`"
