"""One request, task or file does a bounded amount of work, or is refused with a reason: never work without end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.support.conversation import Conversation, dag, reactive, source, taken_back
from tests.support.databases import ORG
from tests.support.surfaces import DirectDispatch
from tracelake.contracts.coverage import BackfillQuery, GapQuery
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.contracts.explain import ExplainRangeQuery
from tracelake.dispatcher.loops import run_in_process
from tracelake.dispatcher.loops.run_in_process import InProcessRuntime
from tracelake.dispatcher.steps.context import Emissions, StepContext
from tracelake.dispatcher.steps.upkeep import reconcile_partitions
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.parse import parse_dag
from tracelake.domain.errors import Invalid, InvalidDag
from tracelake.domain.runtimes import RuntimeTraits
from tracelake.store import coverage, explain, tasks

IN_PROCESS = {"runtime": "dispatcher", "outputs": 1}
SPLITTER = {**IN_PROCESS, "operator": "range_splitter"}
AGGREGATOR = {**IN_PROCESS, "operator": "range_aggregator"}


def capped(ctx: StepContext, events: int, **caps: int) -> Conversation:
    return Conversation(replace(ctx, emissions=Emissions(events=events, **caps)))


async def run_in_this_process(ctx: StepContext, task_id: UUID) -> None:
    runtime = InProcessRuntime(DirectDispatch(ctx), "here")
    runtime.submit(task_id)
    await asyncio.gather(*runtime._running)


async def failed_for_good(talk: Conversation, task_id: UUID) -> str:
    task = await talk.task(task_id)
    assert (task["status"], task["attempt"]) == ("Failed", 1)
    return str(task["error_message"])


@pytest.mark.parametrize("chunk_size", [1, 1000, 1_000_000_000])
async def test_a_range_of_too_many_chunks_is_refused_before_the_first(
    ctx: StepContext, chunk_size: int
) -> None:
    talk = Conversation(ctx)
    splits = reactive("split", "src", **SPLITTER, config={"chunk_size": chunk_size})
    await talk.deploy(dag(source("src"), splits))
    await talk.trigger(start=0, end=MAX_BLOCK)
    task_id = await talk.only_queued("split")
    await run_in_this_process(ctx, task_id)
    said = await failed_for_good(talk, task_id)
    assert f"{MAX_BLOCK // chunk_size + 1:,} chunks of {chunk_size:,} blocks" in said
    assert "may announce 1,000,000" in said
    assert await talk.scopes("split") == []


async def test_a_cursor_of_too_many_ranges_is_refused_before_the_first(ctx: StepContext) -> None:
    talk = Conversation(ctx)
    ranges = reactive(
        "ranges", "src", strategy="PerUpdate", **AGGREGATOR, config={"range_size": 1, "finality": "latest"}
    )
    await talk.deploy(dag(source("src"), ranges))
    await talk.trigger(cursor=MAX_BLOCK - 1)
    task_id = await talk.only_queued("ranges")
    await run_in_this_process(ctx, task_id)
    said = await failed_for_good(talk, task_id)
    assert f"{MAX_BLOCK:,} ranges of 1 blocks" in said
    assert await talk.scopes("ranges") == []


async def test_as_many_chunks_as_are_allowed_are_announced(ctx: StepContext) -> None:
    talk = capped(ctx, events=3)
    await talk.deploy(dag(source("src"), reactive("split", "src", **SPLITTER, config={"chunk_size": 10})))
    await talk.trigger(start=5, end=29)
    task_id = await talk.only_queued("split")
    await run_in_this_process(talk.ctx, task_id)
    assert await talk.status(task_id) == "Completed"
    assert await talk.scopes("split") == [(5, 9), (10, 19), (20, 29)]


async def test_operators_in_this_process_obey_their_timeout(
    ctx: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(run_in_process, "accept_events", for_ever)
    talk = Conversation(ctx)
    splits = reactive("split", "src", **SPLITTER, config={"chunk_size": 1}, timeout_seconds=1, max_attempts=1)
    await talk.deploy(dag(source("src"), splits))
    await talk.trigger(start=0, end=5000)
    task_id = await talk.only_queued("split")
    await run_in_this_process(ctx, task_id)
    assert await failed_for_good(talk, task_id) == "timed out: it ran longer than its timeout_seconds, 1 s"


def announced(uuid: UUID, *starts: int) -> Iterator[EventIn]:
    return (EventIn(dataset_uuid=uuid, start=start, end=start) for start in starts)


async def test_an_attempt_that_emits_too_much_is_refused_and_fails_for_good(ctx: StepContext) -> None:
    talk = capped(ctx, events=3)
    await talk.deploy(dag(source("src"), reactive("job", "src", max_attempts=5)))
    await talk.trigger(start=0, end=9)
    lease = await talk.lease("job")
    uuid = await talk.dataset("job")
    await talk.emit(lease, *announced(uuid, 0, 1))
    with pytest.raises(Invalid, match="has emitted 2 events, 2 more are refused") as refused:
        await talk.emit(lease, *announced(uuid, 2, 3))
    assert refused.value.reason == "TooMuchEmitted"
    with pytest.raises(Invalid, match="refused"):
        await talk.emit(lease, *announced(uuid, 4))
    answer = await talk.complete(lease, status="Failed", error_message="too much", retryable=True)
    assert answer.task_status == "Failed"


async def test_what_came_twice_counts_once(ctx: StepContext) -> None:
    talk = capped(ctx, events=4)
    await talk.deploy(dag(source("src"), reactive("job", "src")))
    await talk.trigger(start=0, end=9)
    lease = await talk.lease("job")
    uuid = await talk.dataset("job")
    for _ in range(3):
        await talk.emit(lease, *announced(uuid, 0, 1))
    await talk.emit(lease, *announced(uuid, 2, 3))


async def test_events_of_other_replicas_count_too(ctx: StepContext) -> None:
    one, other = capped(ctx, events=20), capped(ctx, events=20)
    await one.deploy(dag(source("src"), reactive("job", "src")))
    await one.trigger(start=0, end=99)
    lease = await one.lease("job")
    uuid = await one.dataset("job")
    await one.emit(lease, *announced(uuid, *range(18)))
    await other.emit(lease, *announced(uuid, 18, 19))
    with pytest.raises(Invalid, match="has emitted 20 events"):
        await other.emit(lease, *announced(uuid, 20))


async def test_the_last_events_count_as_well(ctx: StepContext) -> None:
    talk = capped(ctx, events=2)
    await talk.deploy(dag(source("src"), reactive("job", "src")))
    await talk.trigger(start=0, end=9)
    lease = await talk.lease("job")
    uuid = await talk.dataset("job")
    await talk.emit(lease, *announced(uuid, 0, 1))
    with pytest.raises(Invalid, match="1 more are refused"):
        await talk.complete(lease, events=list(announced(uuid, 2)))
    assert await talk.status(lease.task_id) == "Running"


async def test_a_source_may_emit_so_much_within_an_hour(ctx: StepContext) -> None:
    talk = capped(ctx, events=2)
    await talk.deploy(dag(source("src", kind="always_on")))
    [task_id] = await talk.queued("src")
    lease = await talk.lease(task_id)
    uuid = await talk.dataset("src")
    await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=1), EventIn(dataset_uuid=uuid, cursor=2))
    with pytest.raises(Invalid, match="within an hour"):
        await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=3))
    row = (await ctx.db.run(lambda tx: tasks.lock(tx, [lease.task_id])))[lease.task_id]
    assert talk.ctx.emissions.refused(row)
    assert not talk.ctx.emissions.of(replace(row, now=row.now + timedelta(hours=1))).refused


async def test_records_for_buffered_datasets_are_counted(ctx: StepContext) -> None:
    talk = capped(ctx, events=10, records=5, size=1000)
    await talk.deploy(dag(source("src"), reactive("job", "src")))
    await talk.trigger(start=0, end=9)
    lease = await talk.lease("job")
    task = (await ctx.db.run(lambda tx: tasks.lock(tx, [lease.task_id])))[lease.task_id]
    emissions = talk.ctx.emissions
    emissions.check_records(task, 5, 100)
    emissions.add_records(task, 5, 100)
    with pytest.raises(Invalid, match="has emitted 5 records, 1 more are refused"):
        emissions.check_records(task, 1, 1)
    with pytest.raises(Invalid, match="bytes of records"):
        Emissions(size=10).check_records(task, 1, 11)


async def test_looking_at_the_longest_range_is_bounded(ctx: StepContext) -> None:
    talk = Conversation(ctx)
    splits = reactive("split", "src", **SPLITTER, config={"chunk_size": 1})
    await talk.deploy(dag(source("src"), splits, reactive("job", "split", storage="parquet")))
    await talk.trigger(start=0, end=MAX_BLOCK)
    await talk.trigger(start=7, end=7)
    uuid = str(await talk.dataset("job"))
    everything = {"start": 0, "end": MAX_BLOCK}
    page = await ctx.db.run(lambda tx: coverage.gaps(tx, ORG, uuid, GapQuery(**everything, limit=10)))
    assert len(page.gaps) <= 10
    state = await ctx.db.run(
        lambda tx: coverage.backfill(tx, "chain", "job", BackfillQuery(**everything, limit=10))
    )
    assert len(state.events) <= 10
    await ctx.db.run(lambda tx: explain.range_of(tx, ORG, uuid, ExplainRangeQuery(**everything)))
    assert await reconcile_partitions(ctx) == 0


async def test_taking_everything_back_is_bounded(ctx: StepContext) -> None:
    talk = Conversation(ctx)
    await talk.deploy(dag(source("src", kind="always_on"), reactive("job", "src", strategy="PerUpdate")))
    [task_id] = await talk.queued("src")
    lease = await talk.lease(task_id)
    uuid = await talk.dataset("src")
    await talk.emit(lease, EventIn(dataset_uuid=uuid, cursor=MAX_BLOCK - 1))
    await talk.emit(lease, taken_back(uuid, 0, MAX_BLOCK))


INSTALLATION = Installation(runtimes={"ecs_python": RuntimeTraits(untrusted_ok=True)})
JOB = "{{name: {0}, activation: source, runtime: ecs_python, source: {{kind: manual}}}}"


@pytest.mark.parametrize(
    "text",
    [
        "name: d\njobs: [" + JOB.format("a")[:-1] + ", outputs: 100000}]",
        "name: d\njobs: [" + JOB.format("a")[:-1] + ", config: " + "[" * 50_000 + "]" * 50_000 + "}]",
        "name: d\nx0: &a0 [1,2]\n" + "".join(f"x{n}: &a{n} [*a{n - 1},*a{n - 1}]\n" for n in range(1, 31)),
        "name: d\njobs: [" + ", ".join(JOB.format(f"j{n}") for n in range(9_000)) + "]",
        "name: d\njobs: [{name: a, activation: reactive, inputs: [{from: {dataset: x}, where: "
        + '"' + "(" * 5000 + "a = 1" + ")" * 5000 + '"}]}]',
        "name: d\njobs: [{name: a, activation: reactive, inputs: [{from: {dataset: x}, where: "
        + '"' + " or ".join(["a = 1"] * 5000) + '"}]}]',
        "name: d\njobs: [{name: a, activation: reactive, inputs: ["
        + ", ".join(['{from: {dataset: x}, where: "' + " or ".join(["a = 1"] * 450) + '"}'] * 40) + "]}]",
    ],
    ids=["outputs", "nesting", "aliases", "jobs", "parentheses", "words", "predicates"],
)  # fmt: skip
def test_a_file_that_would_unfold_is_refused(text: str) -> None:
    with pytest.raises(InvalidDag) as refused:
        parse_dag(text, INSTALLATION)
    said = " ".join(str(problem) for problem in refused.value.problems)
    assert re.search(r"more than [0-9]+|larger than|longer than|between|from 0 to|nested", said), said
