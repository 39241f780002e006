"""``sql_transform``: one Spark SQL SELECT over the inputs, written as the job's Parquet output.

    config: { sql: "SELECT block_number, count(*) AS logs FROM logs GROUP BY block_number" }

Inputs are views under their published names (``input_0`` and so on where they have none), cut to the task's scope;
those without storage only set it. ``scope_blocks(block_number)`` has one row for each block of it. ``sort_by`` (a
list of columns) and ``blocks_per_file`` say how the files are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tracelake.domain.errors import Invalid
from tracelake.operators.api import operator
from tracelake.operators.context import Context
from tracelake.operators.sql_transform.select_check import check_select

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCOPE_BLOCKS = "scope_blocks"
_CONFIG = {"sql", "sort_by", "blocks_per_file"}


@operator("sql_transform")
def sql_transform(ctx: Context) -> None:
    tables = [source for source in ctx.inputs if source.storage != "none"]
    query, layout = read_config(ctx.config, [source.name for source in tables])
    if len(ctx.outputs) != 1 or ctx.outputs[0].storage != "parquet":
        raise Invalid("InvalidConfig", "sql_transform has exactly one output, with storage parquet")
    if not ctx.blocks:
        ctx.log.info("nothing to do: no new blocks")
        return
    names = [source.name for source in tables]
    ctx.log.info("selecting", start=ctx.blocks.start, end=ctx.blocks.stop - 1, inputs=names)
    for source in tables:
        source.dataframe().createOrReplaceTempView(source.name)
    span = ctx.spark.range(ctx.blocks.start, ctx.blocks.stop).toDF("block_number")
    span.createOrReplaceTempView(SCOPE_BLOCKS)
    written = ctx.outputs[0].write(_select(ctx, query), **layout)
    ctx.log.info("written", rows=written.row_count, files=len(written.files))


def read_config(config: Mapping[str, Any], names: list[str]) -> tuple[str, dict[str, Any]]:
    """The checked query, and how to lay out its result."""
    if unknown := set(config) - _CONFIG:
        raise _wrong(f"unknown: {', '.join(sorted(unknown))}; it knows {', '.join(sorted(_CONFIG))}")
    lowered = [name.lower() for name in names]
    for name in lowered:
        if name == SCOPE_BLOCKS or lowered.count(name) > 1:
            raise _wrong(f"two relations would be called {name!r}")
    sort_by = config.get("sort_by", [])
    if not isinstance(sort_by, list) or not all(isinstance(name, str) for name in sort_by):
        raise _wrong("sort_by must be a list of column names")
    size = config.get("blocks_per_file")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise _wrong("blocks_per_file must be a whole number, 1 or more")
    query = check_select(config.get("sql"), [*names, SCOPE_BLOCKS])
    return query, {"sort_by": sort_by, "blocks_per_file": size}


def _select(ctx: Context, query: str) -> DataFrame:
    """Analyzed here, so that a column that doesn't exist is told apart from a Spark that fails."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        result = ctx.spark.sql(query)
        _ = result.schema
    except (AnalysisException, ParseException) as error:
        first = str(error).strip().splitlines()[0]
        raise Invalid("InvalidSql", f"sql can't be run: {first}") from error
    return result


def _wrong(what: str) -> Invalid:
    return Invalid("InvalidConfig", f"config: {what}")
