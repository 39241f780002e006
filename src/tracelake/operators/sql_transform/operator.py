"""``sql_transform``: one Spark SQL SELECT over the inputs, written as the job's output, Parquet or Postgres.

    config: { sql: "SELECT block_number, count(*) AS logs FROM logs GROUP BY block_number" }

Inputs are views under their published names (``input_0`` and so on where they have none), cut to the task's scope;
those without storage only set it. ``scope_blocks(block_number)`` has one row for each block of it. ``sort_by`` (a
list of columns) and ``blocks_per_file`` say how files are laid out; ``indexes`` (a list of columns, or of lists of
them that are looked up together) and ``partition_blocks`` how a table in Postgres is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tracelake.domain.errors import Invalid
from tracelake.domain.setting_checks import MAX_RANGE, is_whole
from tracelake.domain.spark_select.pieces import Piece
from tracelake.domain.spark_select.queries import read_select
from tracelake.domain.table_layout import TableLayout
from tracelake.operators.api import operator
from tracelake.operators.context import Context
from tracelake.operators.sql_transform.select_check import checked_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCOPE_BLOCKS = "scope_blocks"
FILE_SETTINGS = {"sort_by", "blocks_per_file"}
TABLE_SETTINGS = {"indexes", "partition_blocks"}


@operator("sql_transform")
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
    """The checked query, and how to lay out its result: what ``write`` or ``stage`` are told beside it."""
    known = {"sql", *(FILE_SETTINGS if storage == "parquet" else TABLE_SETTINGS)}
    if unknown := set(config) - known:
        raise _wrong(f"unknown: {', '.join(sorted(unknown))}; it knows {', '.join(sorted(known))}")
    lowered = [name.lower() for name in names]
    for name in lowered:
        if name == SCOPE_BLOCKS or lowered.count(name) > 1:
            raise _wrong(f"two relations would be called {name!r}")
    query = read_select(config.get("sql"), [*names, SCOPE_BLOCKS])
    return query, _files_layout(config) if storage == "parquet" else {"layout": _table_layout(config)}


def _files_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    sort_by = config.get("sort_by", [])
    if not isinstance(sort_by, list) or not all(isinstance(name, str) for name in sort_by):
        raise _wrong("sort_by must be a list of column names")
    return {"sort_by": sort_by, "blocks_per_file": _size(config, "blocks_per_file")}


def _table_layout(config: Mapping[str, Any]) -> TableLayout:
    try:
        listed = msgspec.convert(config.get("indexes", []), list[str | list[str]])
    except msgspec.ValidationError:
        raise _wrong("indexes must be a list of column names, or of lists of them") from None
    indexes = tuple((each,) if isinstance(each, str) else tuple(each) for each in listed)
    return TableLayout(indexes, _size(config, "partition_blocks"))


def _size(config: Mapping[str, Any], name: str) -> int | None:
    size = config.get(name)
    if size is not None and not is_whole(size, 1, MAX_RANGE):
        raise _wrong(f"{name} must be a whole number from 1 to {MAX_RANGE}")
    return size


def _select(ctx: Context, query: Piece, relations: list[str]) -> DataFrame:
    """Analyzed here, so that a column that doesn't exist is told apart from a Spark that fails."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        return checked_frame(ctx.spark, query, relations)
    except (AnalysisException, ParseException) as error:
        first = str(error).strip().splitlines()[0]
        raise Invalid("InvalidSql", f"sql can't be run: {first}") from error


def _wrong(what: str) -> Invalid:
    return Invalid("InvalidConfig", f"config: {what}")
