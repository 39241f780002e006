"""``integrity_check`` on a real Spark, between real steps: what is wrong is found, taken back and made again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.conversation import Conversation, StepLink, dag, reactive, run_operator, source
from tests.support.hot_scene import USUAL, HotChain, rows_of
from tests.support.postgres import CloneDatabase
from tracelake.contracts.dispatcher_api import EventIn, InputFile
from tracelake.contracts.operator_protocol import Action, SparkTarget
from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.pool import Pool
from tracelake.objects.base import ObjectLocation
from tracelake.operators import Context, in_process
from tracelake.operators.integrity_check import against_headers, integrity_check
from tracelake.worker.spark import session as spark_session

LAST = 59


def jobs(verify: str) -> str:
    ingest = reactive("ingest", "src", operator="evm_ingest", outputs=3, config={"rpc_pool": "main"})
    others = [{"from": {"job": "ingest", "output": index}, "trigger": False} for index in (1, 2)]
    config = {"rpc_pool": "main", "verify": verify}
    check = reactive("check", "ingest", *others, operator="integrity_check", outputs=1, config=config)
    return dag(source(), ingest, check, reactive("alarm", "check"))


class Site:
    def __init__(self, talk: Conversation, spark: Any, chain: DevChain, pool: PoolConfig) -> None:
        self.talk = talk
        self.spark = spark
        self.chain = chain
        self.pool = pool

    async def ingested(self, verify: str) -> None:
        await self.talk.deploy(jobs(verify))
        await self.talk.trigger(0, LAST)
        await self.ingest()

    async def ingest(self) -> None:
        await run_operator(self.talk, "ingest", self.spark, rpc_pool=self.pool)

    async def check(self) -> None:
        await run_operator(self.talk, "check", self.spark, rpc_pool=self.pool)

    async def files(self, index: int) -> list[Path]:
        version = (await self.talk.output("ingest", index))["dataset_version"]
        rows = await self.talk.query(
            "SELECT manifest FROM partition WHERE current AND dataset_version = $1", version
        )
        return [
            Path("/" + ObjectLocation.parse(file["location"]).path)
            for row in rows
            for file in row["manifest"]["files"]
        ]

    async def stored(self, dataset: ChainTable) -> pa.Table:
        tables = [pq.ParquetFile(path).read() for path in await self.files(USUAL.index(dataset))]
        return pa.concat_tables(tables).sort_by("block_number").combine_chunks()

    async def rewrite(self, dataset: ChainTable, number: int, change: Any) -> None:
        """Change a committed file behind everybody's back, where it holds a block."""
        for path in await self.files(USUAL.index(dataset)):
            rows = pq.ParquetFile(path).read()
            if number in rows.column("block_number").to_pylist():
                pq.write_table(change(rows), path)

    async def is_right(self) -> bool:
        return all(
            [
                (await self.stored(dataset)).equals(rows_of(self.chain, dataset, 0, LAST).combine_chunks())
                for dataset in USUAL
            ]
        )


@pytest.fixture(scope="module")
def spark(spark_target: SparkTarget) -> Iterator[Any]:
    work = spark_session.begin(spark_session.open_session(spark_target), str(uuid4()), 1, 1)
    yield work.session
    work.end()


@pytest.fixture
def site(ctx: StepContext, spark: Any) -> Iterator[Site]:
    chain = DevChain(seed=3, blocks=LAST)
    with running(chain) as served:
        yield Site(Conversation(ctx), spark, chain, pool_of(served.url))


@pytest.fixture
def stale() -> Iterator[str]:
    """A node that doesn't hear of reorgs."""
    with running(DevChain(seed=3, blocks=LAST)) as served:
        yield served.url


@pytest.mark.parametrize("verify", ["bloom", "full"])
async def test_what_is_right_is_left_alone(site: Site, verify: str) -> None:
    await site.ingested(verify)
    await site.check()
    assert await site.talk.scopes("ingest") == [(0, LAST)]
    assert await site.talk.queued("ingest") == []
    assert await site.talk.scopes("check") == [], "there are no findings"


async def test_a_node_that_has_reorged_below_is_found_out_and_the_range_ingested_again(site: Site) -> None:
    await site.ingested("bloom")
    site.chain.reorg(20)
    await site.check()
    assert await site.talk.scopes("ingest") == [], "nobody reads it any more"
    assert await site.talk.scopes("check") == [(40, LAST)]
    assert len(await site.talk.queued("alarm")) == 1
    await site.ingest()
    assert await site.is_right()
    await site.check()
    assert await site.talk.scopes("ingest") == [(0, LAST)]
    assert await site.talk.queued("ingest") == []


async def test_a_single_value_that_is_wrong_is_found_by_full(site: Site) -> None:
    await site.ingested("full")

    def tamper(rows: pa.Table) -> pa.Table:
        data = rows.column("data").to_pylist()
        data[0] = b"\xff" + data[0][1:]
        return rows.set_column(rows.column_names.index("data"), "data", pa.array(data, pa.binary()))

    number = rows_of(site.chain, ChainTable.LOGS, 0, LAST).column("block_number")[0].as_py()
    await site.rewrite(ChainTable.LOGS, number, tamper)
    await site.check()
    assert await site.talk.scopes("check") == [(number, number)]
    await site.ingest()
    assert await site.is_right()


@pytest.mark.parametrize("dataset", USUAL)
async def test_rows_that_are_lost_are_found(site: Site, dataset: ChainTable) -> None:
    await site.ingested("bloom")
    numbers = rows_of(site.chain, dataset, 0, LAST).column("block_number")
    number = numbers[len(numbers) // 2].as_py()

    def lose(rows: pa.Table) -> pa.Table:
        kept = [n != number for n in rows.column("block_number").to_pylist()]
        return rows.filter(pa.array(kept))

    await site.rewrite(dataset, number, lose)
    await site.check()
    assert (number, number) in await site.talk.scopes("check")
    await site.ingest()
    assert await site.is_right()


async def test_what_stays_wrong_after_it_was_made_again_is_for_a_person(site: Site, stale: str) -> None:
    await site.ingested("bloom")
    site.chain.reorg(20)
    await site.check()
    fresh, site.pool = site.pool, pool_of(stale)
    await site.ingest()
    site.pool = fresh
    with pytest.raises(Invalid) as refused:
        await site.check()
    assert refused.value.reason == "StillWrong"
    assert "block 40: is stored as" in refused.value.message


async def test_a_range_that_is_not_the_child_of_the_one_before_it_is_found_without_the_chain(
    site: Site,
) -> None:
    """Files of a version that recorded no edges: the commit of the second half had nothing to compare."""
    await site.talk.deploy(jobs("off"))
    await site.talk.trigger(0, 29)
    await site.ingest()
    await site.check()
    before = await site.talk.query("SELECT manifest->'edges' AS edges FROM partition WHERE stored")
    await site.talk.query("UPDATE partition SET manifest = manifest - 'edges' RETURNING 1")
    first, *_, last = site.chain.blocks(0, 29)
    hashes = {"parent_hash": "0x" + "00" * 32, "first_hash": first.hash, "last_hash": last.hash}
    assert [row["edges"] for row in before] == [hashes] * len(USUAL)
    site.chain.reorg(40)
    await site.talk.trigger(30, LAST)
    await site.ingest()
    assert await site.talk.scopes("ingest") == [(0, 29), (30, LAST)]
    await site.check()
    assert await site.talk.scopes("ingest") == [(0, 29)], "the newer one is invalidated"
    [row] = await site.talk.query("SELECT DISTINCT reason FROM invalidation")
    assert row["reason"] == "integrity_check: block 30: is not the child of the block before it"


def hot_jobs() -> str:
    config = {"rpc_pool": "main", "chain_id": 31339}
    follower = source("follower", kind="always_on", operator="block_follower", outputs=3, config=config)
    ranges = reactive(
        "ranges",
        "follower",
        strategy="PerUpdate",
        runtime="dispatcher",
        operator="range_aggregator",
        outputs=1,
        config={"range_size": 20},
    )
    hot = [{"from": {"job": "follower", "output": index}, "trigger": False} for index in range(3)]
    check = reactive(
        "check", "ranges", *hot, operator="integrity_check", outputs=1, config={"rpc_pool": "main"}
    )
    return dag(follower, ranges, check)


async def test_hot_rows_that_are_wrong_are_taken_back_from_the_follower(
    site: Site, clone_database: CloneDatabase
) -> None:
    talk = site.talk
    await talk.deploy(hot_jobs())
    versions = [(await talk.output("follower", index))["dataset_version"] for index in range(3)]
    hot = HotChain(clone_database("empty", lambda dsn: None), versions=versions)
    hot.store(site.chain, 0, LAST)
    number = rows_of(site.chain, ChainTable.LOGS, 0, 19).column("block_number")[-1].as_py()
    hot.delete(number, number, ChainTable.LOGS)
    follower = await talk.lease("follower")
    events = [EventIn(await talk.dataset("follower", index), cursor=25, finalized=20) for index in range(3)]
    await talk.emit(follower, *events)
    ranges = await talk.lease("ranges")
    await talk.complete(ranges, events=list(in_process.aggregate_ranges(ranges.payload, None)))
    await run_operator(talk, "check", site.spark, rpc_pool=site.pool, data_ticket_dsn=hot.dsn)
    rewound = await talk.query("SELECT cursor FROM dataset_cursor WHERE dataset_version = ANY($1)", versions)
    assert [row["cursor"] for row in rewound] == [number - 1] * 3
    hot.close()


async def test_what_is_not_committed_yet_is_waited_for(site: Site) -> None:
    await site.talk.deploy(jobs("off"))
    await site.talk.trigger(0, LAST)
    await site.ingest()
    lease = await site.talk.lease("check")
    ctx = Context(lease.payload, _Behind(site.talk, lease, site.spark))
    with pytest.raises(Unavailable) as refused:
        integrity_check(ctx)
    assert refused.value.reason == "InputIncomplete"
    assert "10-59 of input 0" in refused.value.message


def test_endpoints_that_disagree_condemn_nothing(stale: str) -> None:
    stored = DevChain(seed=3, blocks=LAST)
    rows = {dataset: rows_of(stored, dataset, 40, 41) for dataset in USUAL}
    reorged = DevChain(seed=3, blocks=LAST)
    reorged.reorg(20)
    with running(reorged) as served, Pool(pool_of(served.url)) as ahead, _Split(ahead, stale) as both:
        assert [f.start for f in against_headers(ahead, rows, 40, 41) if "is stored as" in f.what] == [40, 41]
        with pytest.raises(Unavailable) as refused:
            list(against_headers(both, rows, 40, 41))
    assert refused.value.reason == "EndpointsDisagree"


class _Behind(StepLink):
    """To a platform that has committed the first ten blocks."""

    def call(self, action: Action) -> Any:
        return msgspec.to_builtins([InputFile("file:///none", 0, 0, 0, 9)])


class _Split(Pool):
    """Asks one endpoint first, and two when it wants to know who has what."""

    def __init__(self, first: Pool, second: str) -> None:
        super().__init__(pool_of(first.config.endpoints[0].url, second))
        self._first = first

    def batch(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        return self._first.batch(calls)
