"""``sql_transform``: one Spark SQL SELECT over the inputs, written as the job's output, Parquet or Postgres.

    config: { sql: "SELECT block_number, count(*) AS logs FROM logs GROUP BY block_number" }

Inputs are views under their published names (``input_0`` and so on where they have none), cut to the task's scope;
those without storage only set it. ``scope_blocks(block_number)`` has one row for each block of it.
``domain.operators.sql_transform`` declares the settings; which of them apply depends on the output's storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from tracelake.domain.errors import Invalid
from tracelake.domain.operators.sql_transform import (
    FILE_SETTINGS,
    SPEC,
    TABLE_SETTINGS,
    SqlTransformSettings,
)
from tracelake.domain.spark_select.pieces import Piece
from tracelake.domain.spark_select.queries import read_select
from tracelake.domain.table_layout import TableLayout
from tracelake.operators.context import Context
from tracelake.operators.registry import operator
from tracelake.operators.sql_transform.select_check import checked_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCOPE_BLOCKS = "scope_blocks"


@operator(SPEC.name)
def sql_transform(ctx: Context) -> None:
    tables = [source for source in ctx.inputs if source.storage != "none"]
    if len(ctx.outputs) != 1 or ctx.outputs[0].storage not in ("parquet", "postgres"):
        raise Invalid(
            "InvalidConfig", "sql_transform has exactly one output, with storage parquet or postgres"
        )
    output = ctx.outputs[0]
    query, layout = read_config(ctx.config, [source.name for source in tables], output.storage)
    if not ctx.blocks:
        ctx.log.info("nothing to do: no new blocks")
        return
    names = [source.name for source in tables]
    ctx.log.info("selecting", start=ctx.blocks.start, end=ctx.blocks.stop - 1, inputs=names)
    # The session belongs to this attempt alone, so the views need no other names.
    for source in tables:
        source.dataframe().createOrReplaceTempView(source.name)
    span = ctx.spark.range(ctx.blocks.start, ctx.blocks.stop).toDF("block_number")
    span.createOrReplaceTempView(SCOPE_BLOCKS)
    result = _select(ctx, query, [*names, SCOPE_BLOCKS])
    if output.storage == "postgres":
        ctx.log.info("staged", rows=output.stage(result, **layout))
    else:
        written = output.write(result, **layout)
        ctx.log.info("written", rows=written.row_count, files=len(written.files))


def read_config(
    config: Mapping[str, Any], names: list[str], storage: str = "parquet"
) -> tuple[Piece, dict[str, Any]]:
    """The checked query, and the layout of its result as arguments of ``write`` or ``stage``."""
    # First, so that a wrong query ends as ``InvalidSql`` here too, as it does when Spark refuses it.
    query = read_select(config.get("sql"), [*names, SCOPE_BLOCKS])
    given = SPEC.read(config)
    unfit = config.keys() & (TABLE_SETTINGS if storage == "parquet" else FILE_SETTINGS)
    if unfit:
        raise _wrong(f"{', '.join(sorted(unfit))}: an output in {storage} has no such setting")
    # Spark ignores case in names of views.
    lowered = [name.lower() for name in names]
    for name in lowered:
        if name == SCOPE_BLOCKS or lowered.count(name) > 1:
            raise _wrong(f"two relations would be called {name!r}")
    return query, _files_layout(given) if storage == "parquet" else {"layout": _table_layout(given)}


def _files_layout(given: SqlTransformSettings) -> dict[str, Any]:
    sort_by = [] if given.sort_by is UNSET else given.sort_by
    return {"sort_by": sort_by, "blocks_per_file": given.blocks_per_file}


def _table_layout(given: SqlTransformSettings) -> TableLayout:
    listed = [] if given.indexes is UNSET else given.indexes
    indexes = tuple((each,) if isinstance(each, str) else tuple(each) for each in listed)
    return TableLayout(indexes, given.partition_blocks)


def _select(ctx: Context, query: Piece, relations: list[str]) -> DataFrame:
    """Analyzed here, to distinguish a query with a missing column from a failure of Spark."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        return checked_frame(ctx.spark, query, relations)
    except (AnalysisException, ParseException) as error:
        first = str(error).strip().splitlines()[0]
        raise Invalid("InvalidSql", f"sql can't be run: {first}") from error


def _wrong(what: str) -> Invalid:
    return Invalid("InvalidConfig", f"config: {what}")
