"""``parquet_compact`` on a real Spark: the files that an ingest would have written, and only of what is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import UNSET
from pyspark.sql import SparkSession

from tests.support.conversation import Conversation, run_operator
from tests.support.hot_scene import USUAL, HotChain, rows_of
from tests.support.operator_process import a_task, an_input, an_output
from tests.support.postgres import CloneDatabase
from tracelake.contracts.dispatcher_api import EventIn, OutputIn, PayloadInput
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Invalid, TracelakeError, Unavailable
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.schemas import TABLES
from tracelake.objects.base import ObjectLocation
from tracelake.objects.directory import DirectoryStore
from tracelake.operators import Context, in_process
from tracelake.operators.evm_ingest import evm_ingest
from tracelake.operators.parquet_compact import parquet_compact
from tracelake.worker.spark import session as spark_session

LAST = 129


class Link:
    """To nobody but Spark."""

    canceled = paused = False

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def call(self, action: Any) -> Any:
        raise AssertionError(action)

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> Any:
        return self._spark


class Site:
    def __init__(self, folder: Path, spark: SparkSession, hot: HotChain) -> None:
        self.store = DirectoryStore(folder / "objects")
        self.link = Link(spark)
        self.hot = hot

    def context(
        self, operator: str, config: dict[str, Any], inputs: list[PayloadInput], **fields: Any
    ) -> Context:
        staging = self.store.staging_prefix(uuid4(), uuid4(), uuid4(), 1, 1)
        outputs = [
            an_output(index, name=name, storage="parquet", staging=staging.child(name).uri)
            for index, name in enumerate(USUAL)
        ]
        return Context(a_task(operator, config=config, inputs=inputs, outputs=outputs), self.link, **fields)

    def compaction(self, start: int, end: int, finalized: int | None = LAST, **config: Any) -> Context:
        said = UNSET if finalized is None else finalized
        hot = [
            PayloadInput(
                index,
                uuid4(),
                version,
                0,
                None,
                "postgres",
                trigger=False,
                start=start,
                end=end,
                finalized=said,
            )
            for index, version in enumerate(self.hot.versions.values(), 1)
        ]
        inputs = [an_input(0, start=start, end=end), *hot]
        return self.context("parquet_compact", config, inputs, data_ticket_dsn=self.hot.dsn)

    def compact(self, start: int, end: int, **how: Any) -> dict[str, OutputIn]:
        return self.run(self.compaction(start, end, **how))

    def run(self, ctx: Context) -> dict[str, OutputIn]:
        try:
            parquet_compact(ctx)
            return reported(ctx)
        finally:
            ctx.close()

    def refused(self, start: int, end: int, **how: Any) -> TracelakeError:
        with pytest.raises(TracelakeError) as refused:
            self.compact(start, end, **how)
        return refused.value


def reported(ctx: Context) -> dict[str, OutputIn]:
    outputs, events = ctx.finish()
    assert events == []
    return {USUAL[output.output_index]: output for output in outputs}


def table_of(output: OutputIn) -> pa.Table:
    assert output.manifest is not None
    paths = ["/" + ObjectLocation.parse(file.location).path for file in output.manifest.files]
    return pa.concat_tables([pq.ParquetFile(path).read() for path in paths])


def differing(one: pa.Table, other: pa.Table) -> list[str]:
    assert one.column_names == other.column_names
    return [name for name in one.column_names if not one.column(name).equals(other.column(name))]


def hashes(outputs: dict[str, OutputIn]) -> dict[str, list[str | None]]:
    return {
        name: [file.content_hash for file in output.manifest.files]
        for name, output in outputs.items()
        if output.manifest
    }


@pytest.fixture(scope="module")
def spark(spark_target: SparkTarget) -> Iterator[SparkSession]:
    work = spark_session.begin(spark_session.open_session(spark_target), str(uuid4()), 1, 1)
    yield work.session
    work.end()


@pytest.fixture(scope="module")
def chain() -> DevChain:
    return DevChain(seed=7, blocks=LAST)


@pytest.fixture
def hot(clone_database: CloneDatabase, chain: DevChain) -> Iterator[HotChain]:
    tables = HotChain(clone_database("empty", lambda dsn: None))
    tables.store(chain, 0, LAST)
    yield tables
    tables.close()


@pytest.fixture
def site(tmp_path: Path, spark: SparkSession, hot: HotChain) -> Site:
    return Site(tmp_path, spark, hot)


def test_compacted_files_are_the_ones_that_an_ingest_writes(site: Site, chain: DevChain) -> None:
    compacted = site.compact(0, LAST, verified="full")
    for dataset in USUAL:
        assert differing(table_of(compacted[dataset]), rows_of(chain, dataset, 0, LAST)) == []
    with running(chain) as served:
        config = {"rpc_pool": "main", "verify": "full"}
        inputs = [an_input(0, start=0, end=LAST)]
        ctx = site.context("evm_ingest", config, inputs, rpc_pool=pool_of(served.url))
        evm_ingest(ctx)
    ingested = reported(ctx)
    assert hashes(compacted) == hashes(ingested)
    edges = [output.manifest and output.manifest.edges for output in compacted.values()]
    assert edges == [output.manifest and output.manifest.edges for output in ingested.values()]
    assert None not in edges
    assert len(hashes(compacted)["blocks"]) > 1, "several cells"


def test_a_range_between_others_is_compacted_alone(site: Site, chain: DevChain) -> None:
    compacted = site.compact(40, 40, finalized=None)
    for dataset in USUAL:
        assert differing(table_of(compacted[dataset]), rows_of(chain, dataset, 40, 40)) == []


def test_a_range_without_logs_is_one_empty_file_with_the_columns(site: Site) -> None:
    site.hot.execute(ChainTable.BLOCKS, "UPDATE {} SET transaction_count = 0 WHERE block_number < 5")
    site.hot.delete(0, 4, ChainTable.TRANSACTIONS, ChainTable.LOGS)
    empty = site.compact(0, 4)["logs"]
    assert empty.manifest is not None
    assert [file.rows for file in empty.manifest.files] == [0]
    assert table_of(empty).schema.names == TABLES[ChainTable.LOGS].arrow.names


@pytest.mark.parametrize(
    ("dataset", "statement", "told"),
    [
        (ChainTable.BLOCKS, "DELETE FROM {} WHERE block_number IN (31, 32)", "blocks 31 to 32: is missing"),
        (
            ChainTable.BLOCKS,
            "UPDATE {} SET parent_hash = block_hash WHERE block_number = 50",
            "block 50: is not the child of the block before it",
        ),
        (
            ChainTable.LOGS,
            "UPDATE {} SET block_hash = '\\x01' WHERE block_number = (SELECT min(block_number) FROM {0})",
            "has logs of another block hash",
        ),
        (
            ChainTable.TRANSACTIONS,
            "DELETE FROM {0} WHERE ctid = (SELECT ctid FROM {0} WHERE block_number = 77 "
            "ORDER BY transaction_index DESC LIMIT 1)",
            "block 77: has another number of transactions than its transaction_count",
        ),
        (ChainTable.LOGS, "INSERT INTO {0} SELECT * FROM {0} WHERE block_number > 120", "more than once"),
    ],
    ids=["missing", "unlinked", "foreign", "uncounted", "doubled"],
)
def test_rows_that_are_not_whole_are_not_compacted(
    site: Site, dataset: ChainTable, statement: str, told: str
) -> None:
    site.hot.execute(dataset, statement.replace("{}", "{0}"))
    refusal = site.refused(0, LAST)
    assert (refusal.reason, isinstance(refusal, Unavailable)) == ("HotIncomplete", True)
    assert told in refusal.message


def test_what_is_not_final_yet_is_left_alone(site: Site) -> None:
    refusal = site.refused(0, 99, finalized=98)
    assert (refusal.reason, refusal.message) == (
        "NotFinal",
        "block 99 isn't final yet: the source reports 98 as final",
    )
    assert isinstance(refusal, Unavailable)
    assert site.refused(0, 99, finality=LAST - 98).reason == "NotFinal"
    site.compact(0, 9, finalized=0, finality="latest")
    site.compact(0, 9, finalized=0, finality=LAST - 9)


def test_all_is_read_at_one_snapshot(site: Site, chain: DevChain) -> None:
    before = {dataset: rows_of(chain, dataset, 100, LAST) for dataset in USUAL}
    ctx = site.compaction(100, LAST)
    ctx.inputs[1].data.snapshot()
    other = DevChain(seed=8, blocks=LAST)
    site.hot.store(other, 100, LAST)
    compacted = site.run(ctx)
    for dataset in USUAL:
        assert differing(table_of(compacted[dataset]), before[dataset]) == []


def test_hot_tables_that_do_not_exist_yet_are_waited_for(site: Site) -> None:
    site.hot.execute(ChainTable.LOGS, "DROP TABLE {}")
    assert site.refused(0, 9).reason == "HotIncomplete"


def test_settings_that_it_does_not_have_are_refused(site: Site) -> None:
    for config in ({"finality": "soon"}, {"delete_hot": True}, {"range_size": 5}, {"blocks_per_file": 0}):
        refusal = site.refused(0, 9, **config)
        assert isinstance(refusal, Invalid)
        assert refusal.reason == "InvalidConfig"


EXAMPLE = """
name: chain
jobs:
  - name: follower
    activation: source
    runtime: ecs_spark
    operator: block_follower
    source: { kind: always_on }
    outputs: 3                       # blocks, transactions, logs
    config: { chain_id: 143, rpc_pool: main, start_block: 0 }
  - name: ranges
    activation: reactive
    runtime: dispatcher
    operator: range_aggregator
    inputs: [{ from: { job: follower, output: 0 } }]
    outputs: 1
    execution_strategy: PerUpdate
    config: { range_size: 100, finality: finalized }
  - name: compact
    activation: reactive
    runtime: ecs_spark
    operator: parquet_compact
    inputs:
      - { from: { job: ranges, output: 0 } }
      - { from: { job: follower, output: 0 }, trigger: false }
    outputs: 3
    execution_strategy: PerPartition
    scaling: { max_concurrency: 4 }
  - name: counts
    activation: reactive
    runtime: ecs_spark
    operator: sql_transform
    inputs:
      - { from: { job: src, output: 0 } }
      - { from: { dataset: blocks }, trigger: false }
      - { from: { dataset: logs }, trigger: false }
    execution_strategy: PerPartition
    config:
      sql: >
        SELECT b.block_number, max(b.block_hash) AS block_hash, count(l.log_index) AS logs
        FROM blocks b LEFT JOIN logs l USING (block_number) GROUP BY b.block_number
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
publish:
  blocks: { from: { job: compact, output: 0 } }
  logs: { from: { job: compact, output: 2 } }
"""


async def test_the_example_of_the_contracts_compacts_and_reads_as_one(
    ctx: StepContext, clone_database: CloneDatabase, spark: SparkSession, chain: DevChain
) -> None:
    talk = Conversation(ctx)
    await talk.deploy(EXAMPLE)
    versions = [(await talk.output("follower", index))["dataset_version"] for index in range(3)]
    hot = HotChain(clone_database("empty", lambda dsn: None), versions=versions)
    hot.store(chain, 0, LAST)
    follower = await talk.lease("follower")
    blocks = await talk.dataset("follower")
    await talk.emit(follower, EventIn(blocks, cursor=LAST, finalized=110))
    ranges = await talk.lease("ranges")
    await talk.complete(ranges, events=list(in_process.aggregate_ranges(ranges.payload, None)))
    await run_operator(talk, "compact", spark, data_ticket_dsn=hot.dsn)
    assert [await talk.scopes("compact", index) for index in range(3)] == [[(0, 99)]] * 3
    hot.delete(0, 99)
    await talk.trigger(0, LAST)
    counts = await run_operator(talk, "counts", spark, data_ticket_dsn=hot.dsn)
    [row] = await talk.query("SELECT manifest FROM partition WHERE current AND task_id = $1", counts.task_id)
    paths = ["/" + ObjectLocation.parse(file["location"]).path for file in row["manifest"]["files"]]
    found = pa.concat_tables([pq.ParquetFile(path).read() for path in paths]).sort_by("block_number")
    per_block = Counter(rows_of(chain, ChainTable.LOGS, 0, LAST).column("block_number").to_pylist())
    assert found.column("block_hash").to_pylist() == (
        rows_of(chain, ChainTable.BLOCKS, 0, LAST).column("block_hash").to_pylist()
    )
    assert found.column("logs").to_pylist() == [per_block[number] for number in range(LAST + 1)]
    hot.close()
