"""Postgres in and out on a real Spark: executors read one snapshot, and load tables that nobody else can add to."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pyarrow as pa
import pytest
from pyspark.sql.connect.session import SparkSession

from tests.support.hot_scene import HotScene
from tests.support.operator_process import an_input
from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import Invalid
from tracelake.domain.table_layout import TableLayout
from tracelake.domain.where_parse import parse_where
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.operators.sql_transform.operator import sql_transform
from tracelake.tables.hot_and_cold import dataframe_of, scan_of_request, split_scan
from tracelake.tables.postgres_staging import load_partition
from tracelake.worker.spark import session as spark_session

VERSION = UUID(int=21)
EMPTY_LOGS = TABLES[ChainTable.LOGS].arrow.empty_table()


@pytest.fixture(scope="module")
def spark(spark_target: SparkTarget) -> Iterator[SparkSession]:
    work = spark_session.begin(spark_session.open_session(spark_target), str(uuid4()), 1, 1)
    yield work.session
    work.end()


@pytest.fixture
def scene(data_dsn: str, spark: SparkSession) -> Iterator[HotScene]:
    scene = HotScene(data_dsn, spark)
    yield scene
    scene.close()


def hot_input(version: UUID = VERSION, where: str | None = None, **scope: Any) -> PayloadInput:
    tree = None if where is None else msgspec.to_builtins(parse_where(where).tree)
    return PayloadInput(0, uuid4(), version, 0, "hot", "postgres", where_tree=tree, **scope)


def committed(scene: HotScene, table: pa.Table, **how: Any) -> None:
    ctx = scene.begin(an_input(start=0, end=10**6), versions=[VERSION])
    ctx.outputs[0].stage(table, **how)
    ctx.finish()


def test_executors_load_what_is_committed_as_if_it_were_one_table(
    scene: HotScene, spark: SparkSession
) -> None:
    ctx = scene.begin(an_input(start=0, end=9999))
    frame = spark.range(0, 10_000, 1, 5).selectExpr(
        "id as block_number",
        "cast(id % 7 as string) as name",
        "unhex(hex(id)) as raw",
        "cast(id as decimal(38,0)) * 1e18bd as wide",
        "if(id % 2 = 0, null, array(id)) as odd",
        "timestamp_micros(id) as at",
    )
    layout = TableLayout(indexes=(("name",),), partition_blocks=1000)
    assert ctx.outputs[0].stage(frame, layout=layout) == 10_000
    ctx.outputs[0].stage(frame.where("block_number = 3"))
    assert len(scene.staging_tables()) == 7
    [output], _ = ctx.finish()
    assert output.row_count == 10_001
    assert scene.staging_tables() == []
    rows = scene.rows(ctx)
    assert [row[0] for row in rows] == sorted([*range(10_000), 3])
    assert rows[-1][1:3] == ("3", bytes.fromhex("270F"))
    assert (rows[-1][3], rows[-1][4]) == (9999 * 10**18, [9999])


def test_a_frame_without_rows_makes_the_table(scene: HotScene, spark: SparkSession) -> None:
    ctx = scene.begin(an_input(start=0, end=9))
    assert ctx.outputs[0].stage(spark.range(0).selectExpr("id as block_number")) == 0
    ctx.finish()
    assert scene.rows(ctx) == []


def test_what_is_wrong_with_rows_of_a_frame_is_told_by_its_column(
    scene: HotScene, spark: SparkSession
) -> None:
    ctx = scene.begin(an_input(start=0, end=9))
    frame = spark.range(3).selectExpr("id as block_number", "concat('a', char(0)) as note")
    with pytest.raises(Invalid, match="column 'note': Postgres can't keep text with NUL characters"):
        ctx.outputs[0].stage(frame)


def test_a_spark_task_that_runs_twice_or_goes_on_changes_nothing_that_was_reported(
    scene: HotScene, spark: SparkSession
) -> None:
    """As a speculative or repeated task does: the same rows, by the same function."""
    ctx = scene.begin(an_input(start=0, end=9))
    output = ctx.outputs[0]
    output.stage(spark.range(1, 2, 1, 1).toDF("block_number"))
    assert scene.wrapper is not None
    assert scene.wrapper.ticket is not None
    dsn = scene.wrapper.ticket.dsn
    [like, _] = scene.staging_tables()

    def task() -> Generator[pa.RecordBatch, None, None]:
        rows = pa.record_batch({"block_number": pa.array([5, 6], pa.int64())})
        return load_partition(dsn, like, iter([rows]))

    zombie, twin = task(), task()
    [[told], [also]] = [batch.to_pylist() for batch in (next(zombie), next(twin))]
    assert told["rows"] == also["rows"] == 2
    assert told["name"] != also["name"]
    assert len(scene.staging_tables()) == 4
    ctx.finish()
    assert scene.rows(ctx) == [(1,)], "nobody reported what they loaded"
    zombie.close()
    twin.close()
    scene.end(ctx)
    assert scene.staging_tables() == []


def test_executors_read_one_snapshot_cut_and_filtered(scene: HotScene, spark: SparkSession) -> None:
    rows = pa.table({"block_number": [n // 10 for n in range(5000)], "n": list(range(5000))})
    committed(scene, rows)
    ctx = scene.begin(hot_input(where="n not in (205, 206)", start=20, end=99), versions=[])
    source = ctx.inputs[0]
    scan = scan_of_request(source.request())
    assert scan is not None
    parts = split_scan(scan, source.data.snapshot().connection, rows_per_task=100)
    assert len(parts) > 3
    split, whole = dataframe_of(scan, scene.spark, parts), source.dataframe()
    committed(scene, pa.table({"block_number": [20], "n": [0]}))
    expected = [n for n in range(200, 1000) if n not in (205, 206)]
    for frame in (split, whole):
        assert sorted(row["n"] for row in frame.select("n").collect()) == expected
    nothing = scene.begin(hot_input(start=10**6, end=10**7), versions=[])
    assert nothing.inputs[0].dataframe().schema == whole.schema
    assert nothing.inputs[0].dataframe().count() == 0


def test_a_chain_table_has_the_same_schema_in_spark_whether_it_is_hot_or_cold(
    scene: HotScene, spark: SparkSession
) -> None:
    logs = TABLES[ChainTable.LOGS]
    committed(scene, logs.to_hot(EMPTY_LOGS), types=logs.postgres_types)
    frame = scene.begin(hot_input(), versions=[]).inputs[0].dataframe()
    assert frame.schema == spark.createDataFrame([], logs.spark).schema


def test_sql_transform_writes_hot_tables_from_hot_tables(scene: HotScene, data_dsn: str) -> None:
    committed(scene, pa.table({"block_number": [1, 1, 2, 9], "v": [1, 2, 3, 4]}))
    ctx = scene.begin(
        hot_input(start=0, end=5),
        config={
            "sql": "select block_number, sum(v) as total from hot group by block_number",
            "indexes": ["total", ["block_number", "total"]],
            "partition_blocks": 1000,
        },
    )
    sql_transform(ctx)
    [output], _ = ctx.finish()
    assert output.row_count == 2
    assert scene.rows(ctx) == [(1, 3), (2, 3)]
    with psycopg.connect(data_dsn) as connection:
        query = "SELECT count(*) FROM pg_indexes WHERE tablename = %s"
        table = f"d_{ctx.task.outputs[0].dataset_version.hex}"
        assert connection.execute(query, [table]).fetchone() == (2,)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"sort_by": ["a"]}, "sort_by: an output in postgres has no such setting"),
        ({"indexes": "a"}, "indexes: must be a list"),
        ({"indexes": [[1]]}, "indexes: must be a list"),
        ({"partition_blocks": 0}, "partition_blocks: must be a whole number"),
    ],
)
def test_what_a_hot_table_of_sql_transform_cannot_be_is_refused(
    scene: HotScene, config: dict[str, Any], why: str
) -> None:
    ctx = scene.begin(hot_input(start=0, end=5), config={"sql": "select 1 as block_number", **config})
    with pytest.raises(Invalid, match=why):
        sql_transform(ctx)
