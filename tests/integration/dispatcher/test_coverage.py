"""Gaps and backfills as the Dispatcher sees them: what is committed, what is on its way, what nobody asked for."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.conversation import Conversation, dag, reactive, source
from tests.support.databases import ORG
from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.contracts.coverage import BackfillQuery, BackfillState, GapQuery
from tracelake.contracts.dispatcher_api import TriggerRequest
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import deploy_dag
from tracelake.dispatcher.steps.interventions import pause_job
from tracelake.domain.errors import Invalid, NotFound
from tracelake.operators import in_process
from tracelake.store import coverage
from tracelake.store.db import Row, Transaction

EXAMPLES = Path(__file__).parents[3] / "examples"
SPLITTER = {
    "runtime": "dispatcher",
    "operator": "range_splitter",
    "config": {"chunk_size": 1000},
    "outputs": 1,
}
INGEST = {
    "outputs": [{"name": "blocks", "storage": "parquet"}, {"name": "logs", "storage": "parquet"}],
    "operator": "my_ingest",
    "max_attempts": 1,
}
DAG = dag(
    source("src"),
    reactive("split", "src", **SPLITTER),
    reactive("ingest", "split", **INGEST),
    reactive("follower-up", "ingest", storage="parquet"),
)
COMMIT = """
INSERT INTO partition (dataset_version, version_no, range_start, range_end, stored, current, revision)
SELECT dv.dataset_version, dv.version_no, r.a, r.b, dv.storage <> 'none', true, 0
FROM dataset_version dv JOIN dataset d USING (dataset_uuid),
     unnest($3::bigint[], $4::bigint[]) AS r(a, b)
WHERE d.job_name = $1 AND ($2::int IS NULL OR dv.output_index = $2)
"""


class Chain:
    def __init__(self, ctx: StepContext) -> None:
        self.ctx = ctx

    async def fetch(self, query: str, *args: Any) -> list[Row]:
        return await self.ctx.db.run(lambda tx: tx.fetch(query, *args))

    async def commit(self, job: str, *ranges: tuple[int, int], output: int | None = None) -> None:
        starts, ends = [a for a, _ in ranges], [b for _, b in ranges]
        await self.fetch(COMMIT, job, output, starts, ends)

    async def uuid(self, job: str, output: int = 0) -> str:
        rows = await self.fetch(
            "SELECT dataset_uuid FROM dataset WHERE job_name = $1 AND output_index = $2", job, output
        )
        return str(rows[0]["dataset_uuid"])

    async def gaps(self, job: str, **query: int) -> list[tuple[int, int]]:
        """All pages."""
        name, found, after = await self.uuid(job), [], query.pop("after", None)
        while True:
            asked = GapQuery(**query, **({} if after is None else {"after": after}))

            async def look(tx: Transaction, asked: GapQuery = asked) -> Any:
                return await coverage.gaps(tx, ORG, name, asked)

            page = await self.ctx.db.run(look)
            found += [(gap.start, gap.end) for gap in page.gaps]
            if page.next is None:
                return found
            after = int(page.next)

    async def state(self, start: int, end: int, job: str = "ingest", **query: Any) -> BackfillState:
        asked = BackfillQuery(start=start, end=end, **query)
        return await self.ctx.db.run(lambda tx: coverage.backfill(tx, "chain", job, asked))

    async def ask(self, state: BackfillState) -> None:
        for event in state.events:
            request = TriggerRequest(start=event.start, end=event.end)
            await trigger_source(self.ctx, state.source.dag_name, state.source.job, request)

    async def tasks(self, job: str) -> list[Row]:
        return await self.fetch(
            "SELECT t.* FROM task t JOIN job j USING (job_id) WHERE j.name = $1 ORDER BY t.seq", job
        )

    async def split(self, talk: Conversation) -> None:
        """Plays the Dispatcher's own runtime: every waiting range becomes chunks."""
        for task_id in await talk.queued("split"):
            lease = await talk.lease(task_id)
            await talk.complete(lease, events=list(in_process.split_range(lease.payload)))


@pytest_asyncio.fixture
async def chain(ctx: StepContext) -> Chain:
    await deploy_dag(ctx, DAG, "tester")
    return Chain(ctx)


@pytest_asyncio.fixture
async def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest_asyncio.fixture
async def surfaces(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


def missing(ranges: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Block by block."""
    covered = {block for a, b in ranges for block in range(a, b + 1)}
    found: list[tuple[int, int]] = []
    for block in range(start, end + 1):
        if block not in covered:
            if found and found[-1][1] == block - 1:
                found[-1] = (found[-1][0], block)
            else:
                found.append((block, block))
    return found


async def test_gaps_are_exactly_the_blocks_that_no_partition_has(chain: Chain) -> None:
    chance = random.Random(4)
    for _ in range(15):
        await chain.fetch("DELETE FROM partition")
        cuts = sorted(chance.sample(range(60), 2 * chance.randint(1, 6)))
        stored = list(zip(cuts[::2], [cut - 1 for cut in cuts[1::2]], strict=True))
        overlapping = [(a, a + chance.randint(0, 25)) for a in chance.sample(range(50), 4)]
        await chain.commit("ingest", *stored)
        await chain.commit("split", *overlapping)
        start, end = sorted(chance.sample(range(70), 2))
        for job, ranges in (("ingest", stored), ("split", overlapping)):
            for limit in (1, 2, 100):
                found = await chain.gaps(job, start=start, end=end, limit=limit)
                assert found == missing(ranges, start, end), (ranges, start, end)
            whole = await chain.gaps(job)
            assert whole == missing(ranges, min(a for a, _ in ranges), max(b for _, b in ranges))


async def test_without_a_range_gaps_are_looked_for_between_what_is_committed(chain: Chain) -> None:
    assert await chain.gaps("ingest") == []
    assert await chain.gaps("ingest", start=5) == []
    assert await chain.gaps("ingest", start=0, end=9) == [(0, 9)]
    await chain.commit("ingest", (100, 199), (300, 399))
    assert await chain.gaps("ingest") == [(200, 299)]
    assert await chain.gaps("ingest", start=50) == [(50, 99), (200, 299)]
    assert await chain.gaps("ingest", end=450) == [(200, 299), (400, 450)]
    with pytest.raises(Invalid, match="no range"):
        await chain.gaps("ingest", start=2, end=1)


async def test_a_dataset_with_a_cursor_has_everything_from_its_start_to_there(
    ctx: StepContext, chain: Chain
) -> None:
    hot = source("hot", kind="always_on", storage="postgres", config={"start_block": 50})
    await deploy_dag(ctx, dag(hot, name="live"), "tester")
    await chain.fetch(
        "INSERT INTO dataset_cursor (dataset_version, cursor) "
        "SELECT dataset_version, 80 FROM dataset_version JOIN dataset USING (dataset_uuid) WHERE job_name = 'hot'"
    )
    assert await chain.gaps("hot") == []
    assert await chain.gaps("hot", start=0, end=100) == [(0, 49), (81, 100)]
    assert await chain.gaps("hot", start=0, end=100, limit=1) == [(0, 49), (81, 100)]


async def test_the_api_answers_gaps_by_name_and_refuses_nonsense(chain: Chain, surfaces: Surfaces) -> None:
    await chain.commit("ingest", (0, 9), (20, 29))
    uuid = await chain.uuid("ingest")
    answer = await surfaces.person.get(f"/v1/datasets/{uuid}/gaps")
    assert answer.json()["gaps"] == [{"start": 10, "end": 19, "blocks": 10}]
    assert (answer.json()["start"], answer.json()["end"], answer.json()["next"]) == (0, 29, None)
    for query in ("from=-1", "to=x", "limit=0", "after=1-2", f"to={2**63}"):
        assert (await surfaces.person.get(f"/v1/datasets/{uuid}/gaps?{query}")).status_code == 422
    assert (await surfaces.person.get("/v1/datasets/nobody/gaps")).status_code == 404
    assert (await surfaces.user.get(f"/v1/datasets/{uuid}/gaps")).status_code == 401
    listed = await surfaces.person.get("/v1/datasets?dag=chain&job=ingest")
    assert sorted(each["output_name"] for each in listed.json()["datasets"]) == ["blocks", "logs"]


async def test_only_what_no_output_is_short_of_counts_as_committed(chain: Chain) -> None:
    await chain.commit("ingest", (0, 999), (2000, 2999), output=0)
    await chain.commit("ingest", (0, 999), (1000, 1999), output=1)
    state = await chain.state(0, 3999)
    assert (state.blocks, state.committed_blocks) == (4000, 1000)
    assert (state.chunks, state.committed_chunks, state.asked_chunks, state.unasked_chunks) == (4, 1, 0, 3)
    assert [(event.start, event.end) for event in state.events] == [(1000, 3999)]
    assert (state.source.job, state.splitter.job if state.splitter else None) == ("src", "split")


async def test_a_million_blocks_are_one_event_for_the_splitter(chain: Chain) -> None:
    state = await chain.state(0, 999_999)
    assert (state.chunks, state.unasked_chunks) == (1000, 1000)
    assert [(event.start, event.end) for event in state.events] == [(0, 999_999)]


async def test_newest_first_asks_chunk_by_chunk_from_above(chain: Chain) -> None:
    await chain.commit("ingest", (2000, 2999))
    state = await chain.state(500, 4100, order="newest")
    spans = [(event.start, event.end) for event in state.events]
    assert spans == [(4000, 4100), (3000, 3999), (1000, 1999), (500, 999)]
    coarse = await chain.state(0, 4_999_999, order="newest")
    assert coarse.chunks == 5000
    assert len(coarse.events) == 201
    assert (coarse.events[0].start, coarse.events[0].end) == (4_975_000, 4_999_999)


async def test_what_is_on_its_way_is_not_asked_for_twice(chain: Chain, talk: Conversation) -> None:
    await chain.ask(await chain.state(0, 2500))
    waiting = await chain.state(0, 2500)
    assert (waiting.events, waiting.asked_chunks, waiting.queued) == ([], 3, 1)
    await chain.split(talk)
    split = await chain.state(0, 3999)
    assert [(event.start, event.end) for event in split.events] == [(2501, 3999)]
    assert (split.queued, split.running, split.failures) == (3, 0, 0)
    await talk.lease((await talk.queued("ingest"))[0])
    assert ((await chain.state(0, 3999)).queued, (await chain.state(0, 3999)).running) == (2, 1)
    await chain.ask(split)
    await chain.ask(split)
    await chain.split(talk)
    scopes = [(task["range_start"], task["range_end"]) for task in await chain.tasks("ingest")]
    assert scopes == [(0, 999), (1000, 1999), (2000, 2500), (2501, 2999), (3000, 3999)]
    assert (await chain.state(0, 3999)).events == []


async def test_failed_and_canceled_tasks_are_named_until_their_blocks_are_there(
    chain: Chain, talk: Conversation
) -> None:
    await chain.ask(await chain.state(0, 2999))
    await chain.split(talk)
    first, second, _ = await talk.queued("ingest")
    await talk.complete(
        await talk.lease(first), status="Failed", error_message="past the tip", retryable=False
    )
    await talk.cancel(second)
    state = await chain.state(0, 2999)
    assert (state.failures, state.queued, state.events) == (2, 1, [])
    told = [(each.status, each.start, each.end, each.error_message) for each in state.failed]
    assert told[0] == ("Failed", 0, 999, "past the tip")
    assert told[1][:3] == ("Canceled", 1000, 1999)
    await chain.commit("ingest", (0, 999))
    assert [each.start for each in (await chain.state(0, 2999)).failed] == [1000]


async def test_what_a_paused_job_was_told_counts_as_asked_for(
    ctx: StepContext, chain: Chain, talk: Conversation
) -> None:
    await pause_job(ctx, "chain", "ingest", "tester")
    await chain.ask(await chain.state(0, 1999))
    await chain.split(talk)
    state = await chain.state(0, 1999)
    assert (state.events, state.asked_chunks, state.queued) == ([], 2, 0)
    assert [each.job for each in state.paused] == ["ingest"]


async def test_chunks_finer_than_the_splitters_must_lie_on_its_grid(chain: Chain) -> None:
    state = await chain.state(100, 1099, chunk=500)
    assert [(event.start, event.end) for event in state.events] == [(100, 499), (500, 999), (1000, 1099)]
    for wrong in (300, 2000):
        with pytest.raises(Invalid, match=r"the grid of chain/split, which cuts at every 1,000"):
            await chain.state(0, 9, chunk=wrong)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("lonely", "chain/lonely isn't fed by a manual source: put one before it"),
        ("both", "chain/both is fed by several manual sources: chain/one, chain/two"),
        ("derived", "chain/derived follows chain/good: backfill those"),
        ("follower", "chain/follower is a source (always_on)"),
        ("one", "chain/one feeds several jobs, name one of them: chain/both, chain/good"),
        ("nothing", "chain/nothing feeds no job that stores rows"),
        ("updates", "chain/updates doesn't run PerPartition"),
    ],
)
async def test_a_job_that_no_range_can_be_asked_of_says_why(ctx: StepContext, job: str, told: str) -> None:
    jobs = [
        *(source(name) for name in ("one", "two", "nothing")),
        source("follower", kind="always_on", storage="postgres"),
        reactive("pass-on", "follower", operator="mine", strategy="PerUpdate"),
        reactive("lonely", "pass-on", storage="parquet", operator="mine"),
        reactive("good", "one", storage="parquet", operator="mine"),
        reactive("both", "one", "two", storage="parquet", operator="mine"),
        reactive("derived", "good", storage="parquet", operator="mine"),
        reactive("updates", "good", storage="parquet", operator="mine", strategy="PerUpdate"),
    ]
    await deploy_dag(ctx, dag(*jobs), "tester")
    with pytest.raises(Invalid) as refused:
        await Chain(ctx).state(0, 9, job=job)
    assert told in refused.value.message


async def test_the_splitter_and_the_source_stand_for_the_job_that_they_feed(chain: Chain) -> None:
    assert {(await chain.state(0, 9, job=job)).job.job for job in ("src", "split", "ingest")} == {"ingest"}
    with pytest.raises(NotFound):
        await chain.state(0, 9, job="nobody")


async def test_without_a_splitter_every_event_is_a_task(ctx: StepContext) -> None:
    await deploy_dag(ctx, dag(source("src"), reactive("ingest", "src", **INGEST)), "tester")
    state = await Chain(ctx).state(0, 2499)
    assert state.splitter is None
    assert [(event.start, event.end) for event in state.events] == [(0, 999), (1000, 1999), (2000, 2499)]
    assert len((await Chain(ctx).state(0, 2499, chunk=100)).events) == 25


async def test_another_job_that_the_source_feeds_is_told_of(ctx: StepContext) -> None:
    jobs = [reactive(name, "src", storage="parquet", operator="mine") for name in ("a", "b")]
    await deploy_dag(ctx, dag(source("src"), *jobs), "tester")
    assert [each.job for each in (await Chain(ctx).state(0, 9, job="a")).runs_also] == ["b"]


async def test_the_example_mirror_deploys_and_its_past_can_be_asked_for(ctx: StepContext) -> None:
    for example in ("chain_mirror", "erc20"):
        await deploy_dag(ctx, (EXAMPLES / example / "dag.yaml").read_text(encoding="utf-8"), "tester")
    asked = BackfillQuery(start=0, end=999)
    state = await ctx.db.run(lambda tx: coverage.backfill(tx, "chain_mirror", "ingest", asked))
    assert (state.source.job, state.chunks, state.max_concurrency) == ("past", 10, 2)
