"""The declaration of ``sql_transform``.

A deploy checks the settings, and the query as far as it can without Spark and without the names of the inputs.
Which of the other settings apply depends on the output's storage; the operator checks that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType

from tracelake.domain.dag.model import Activation, Storage
from tracelake.domain.errors import Invalid
from tracelake.domain.operators import shared_settings as shared
from tracelake.domain.operators.spec import Need, OperatorSpec, Setting, model_problems
from tracelake.domain.runtimes import ECS_SPARK
from tracelake.domain.spark_select.queries import read_select

FILE_SETTINGS = frozenset({"sort_by", "blocks_per_file"})
TABLE_SETTINGS = frozenset({"indexes", "partition_blocks"})


class SqlTransformSettings(Struct, frozen=True, kw_only=True):
    sql: Annotated[str, Setting("The `SELECT`, up to 64 KiB.")]
    sort_by: Annotated[
        list[str] | UnsetType,
        Setting(
            "Parquet: columns that rows are sorted by.", must="a list of column names", decides_rows=False
        ),
    ] = UNSET
    blocks_per_file: Annotated[
        shared.RangeSize | None,
        Setting(
            "Parquet: blocks per file; without it the range decides.",
            must=shared.MUST_BE_RANGE,
            decides_rows=False,
        ),
    ] = None
    indexes: Annotated[
        list[str | list[str]] | UnsetType,
        Setting(
            "Postgres: columns that are looked up, or lists of those looked up together.",
            must="a list of column names, or of lists of them",
            decides_rows=False,
        ),
    ] = UNSET
    partition_blocks: Annotated[
        shared.RangeSize | None,
        Setting(
            "Postgres: number of blocks in a partition of the table.",
            must=shared.MUST_BE_RANGE,
            decides_rows=False,
        ),
    ] = None


def _problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    try:
        read_select(config.get("sql"), None)
    except Invalid as error:
        yield "sql", error.message.removeprefix("sql ")
    yield from model_problems(SqlTransformSettings, config, but=("sql",))


SPEC = OperatorSpec(
    "sql_transform",
    SqlTransformSettings,
    checks=_problems,
    about="One Spark SQL `SELECT` over its inputs, cut to the task's blocks. Only functions that compute values "
    "are allowed in it, and nothing that changes from run to run: text becomes a timestamp by "
    "`to_timestamp(text, format)`, and `from_json(text, 'a INT, b STRING')` takes its schema as one string.",
    reads="its inputs under their published names, or `input_0` and so on; `scope_blocks(block_number)` has one "
    "row for each block of the task",
    writes="the columns of the `SELECT`",
    runtimes=(ECS_SPARK,),
    needs=frozenset({Need.SPARK}),
    function="tracelake.operators.sql_transform.operator:sql_transform",
    activation=Activation.REACTIVE,
    outputs=("result",),
    storage=Storage.PARQUET,
    storages=frozenset({Storage.PARQUET, Storage.POSTGRES}),
)
