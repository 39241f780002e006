"""Ticks and triggers of sources: each becomes one event or one task, whatever repeats, pauses or redeploys come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio

from tests.support.conversation import Conversation, Lease, dag, reactive, source
from tracelake.contracts.dispatcher_api import EventIn, PayloadSource, TriggerRequest, TriggerResponse
from tracelake.contracts.sources import (
    SchedulesRequest,
    SchedulesResponse,
    SourceSummary,
    TickIn,
    TickOut,
)
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.accept_ticks import accept_ticks, run_source, schedules
from tracelake.dispatcher.steps.apply_backpressure import balance
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import pause_job, resume_job, retry_task
from tracelake.dispatcher.steps.source_requests import route_waiting
from tracelake.domain.errors import Conflict, Invalid
from tracelake.scheduler.ticks import RoundResult, run_round
from tracelake.store import jobs, sources
from tracelake.store.db import Transaction
from tracelake.store.jobs import ActiveJob

HOUR = 3600
DAY = 24 * HOUR


@pytest_asyncio.fixture
async def talk(ctx: StepContext) -> Conversation:
    """Ten seconds past a minute: a test has time until the next one comes by itself."""
    talk = Conversation(ctx)
    now = (await Scheduler(ctx).schedules("nobody")).now
    await talk.pass_time(70 - now.second)
    await schedules(ctx, SchedulesRequest("nobody", release=True))
    return talk


class Scheduler:
    """A scheduler's rounds, without its process."""

    def __init__(self, ctx: StepContext, name: str = "one") -> None:
        self.ctx = ctx
        self.name = name

    async def schedules(self, scheduler_id: str) -> SchedulesResponse:
        return await schedules(self.ctx, SchedulesRequest(scheduler_id))

    async def send_ticks(self, ticks: Sequence[TickIn]) -> list[TickOut]:
        return await accept_ticks(self.ctx, ticks)

    async def round(self) -> RoundResult:
        return await run_round(self, self.name)


def cron(name: str = "src", schedule: str = "* * * * *", **fields: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key in ("timezone", "catch_up"):
        if key in fields:
            settings[key] = fields.pop(key)
    how: dict[str, Any] = {"kind": "cron", "schedule": schedule, **settings}
    return {**source(name, **fields), "source": how}


PLAIN = dag(cron(), reactive("work", "src", strategy="PerUpdate"))
CODE = {"operator": "own", "runtime": "ecs_python"}


def states(done: RoundResult) -> list[str]:
    return [tick.state for tick in done.sent]


async def test_a_tick_is_one_event_with_its_time_as_cursor_and_one_task_downstream(
    talk: Conversation,
) -> None:
    await talk.deploy(PLAIN)
    one, two = Scheduler(talk.ctx), Scheduler(talk.ctx, "two")
    assert states(await one.round()) == []
    await talk.pass_time(61)
    done = await one.round()
    [tick] = done.sent
    assert (tick.state, tick.tasks_created, tick.tick % 60) == ("accepted", 1, 0)
    assert done.next_at == datetime.fromtimestamp(tick.tick + 60, UTC)
    lease = await talk.lease("work")
    assert (lease.read.after, lease.read.upto) == (-1, tick.tick)
    assert [(row["kind"], row["range_end"]) for row in await talk.events()] == [("cursor", tick.tick)]
    # Again, also by a scheduler that doesn't know that another one acts, or whose answer was lost.
    again = TickIn("chain", "src", tick.tick)
    assert [each.state for each in await two.send_ticks([again, again])] == ["known", "known"]
    assert states(await one.round()) == []
    assert len(await talk.events()) == 1


async def test_many_schedulers_send_a_tick_at_once_and_it_exists_once(talk: Conversation) -> None:
    await talk.deploy(PLAIN)
    now = (await Scheduler(talk.ctx).schedules("one")).now
    await talk.pass_time(HOUR)
    ticks = [TickIn("chain", "src", int(now.timestamp()) // 60 * 60 + 60 * n) for n in (1, 2, 3)]
    answers = await asyncio.gather(*(accept_ticks(talk.ctx, ticks) for _ in range(6)))
    accepted = [tick.tick for answer in answers for tick in answer if tick.state == "accepted"]
    assert sorted(accepted) == sorted({*accepted}), "each at most once"
    assert max(accepted) == ticks[-1].tick
    assert [row["range_end"] for row in await talk.events()] == sorted(accepted)


async def test_ticks_of_the_future_and_of_what_is_no_cron_source_are_refused_one_by_one(
    talk: Conversation,
) -> None:
    await talk.deploy(dag(cron(), source("hand"), reactive("work", "src", "hand", strategy="PerUpdate")))
    now = int((await Scheduler(talk.ctx).schedules("one")).now.timestamp())
    names = [("chain", "src"), ("chain", "hand"), ("chain", "work"), ("chain", "gone"), ("else", "src")]
    sent = [TickIn(dag_name, job, now + 120) for dag_name, job in names]
    assert [each.state for each in await accept_ticks(talk.ctx, sent)] == ["early", *["unknown"] * 4]
    before = [TickIn("chain", "src", now - 120)]
    assert [each.state for each in await accept_ticks(talk.ctx, before)] == ["known"], (
        "from before the deploy"
    )
    assert await talk.events() == []


async def test_one_scheduler_acts_until_it_stops_or_is_late(talk: Conversation) -> None:
    await talk.deploy(PLAIN)
    one, two = Scheduler(talk.ctx), Scheduler(talk.ctx, "two")
    assert (await one.round()).acting
    assert not (await two.round()).acting
    await talk.pass_time(8)
    assert (await one.round()).acting
    await talk.pass_time(8)
    assert not (await two.round()).acting
    await talk.pass_time(8)
    assert (await two.round()).acting
    assert not (await one.round()).acting
    await schedules(talk.ctx, SchedulesRequest("two", release=True))
    assert (await one.round()).acting
    # Set back by a day, the clock must not give a dead scheduler a lease of a day.
    await talk.pass_time(-86_400)
    assert (await two.round()).acting


@pytest.mark.parametrize(("catch_up", "made"), [("all", 60), ("latest", 1), ("none", 1)])
async def test_after_an_outage_of_an_hour(talk: Conversation, catch_up: str, made: int) -> None:
    await talk.deploy(dag(cron(catch_up=catch_up), reactive("work", "src", strategy="PerUpdate")))
    scheduler = Scheduler(talk.ctx)
    await talk.pass_time(HOUR)
    done = await scheduler.round()
    assert states(done) == ["accepted"] * made
    assert [tick.tick for tick in done.sent] == [row["range_end"] for row in await talk.events()]


async def test_a_clock_that_is_set_back_by_a_day_fires_nothing_twice(talk: Conversation) -> None:
    await talk.deploy(dag(cron(catch_up="all"), reactive("work", "src", strategy="PerUpdate")))
    scheduler = Scheduler(talk.ctx)
    await talk.pass_time(600)
    assert len(states(await scheduler.round())) == 10
    await talk.pass_time(-86_400)
    for _ in range(4):
        await talk.pass_time(3 * HOUR)
        assert states(await scheduler.round()) == []
    await talk.pass_time(12 * HOUR + 120)
    assert states(await scheduler.round()) == ["accepted"] * 2
    ticks = [row["range_end"] for row in await talk.events()]
    assert ticks == sorted({*ticks})


@pytest.mark.parametrize("code", [False, True])
async def test_a_clock_that_was_ahead_for_a_while_stops_no_schedule(talk: Conversation, code: bool) -> None:
    fields = CODE if code else {}
    await talk.deploy(dag(cron(**fields), reactive("work", "src", strategy="PerUpdate")))
    scheduler = Scheduler(talk.ctx)
    await talk.pass_time(60)
    [first] = (await scheduler.round()).sent
    await talk.pass_time(400 * DAY)
    [stray] = (await scheduler.round()).sent
    if not code:
        lease = await talk.lease("work")
        assert lease.read.upto == stray.tick
        await talk.complete(lease)

    await talk.pass_time(-400 * DAY + 120)
    assert (await listed(talk)).last_tick == first.tick
    [tick] = (await scheduler.round()).sent
    assert (tick.state, tick.tick) == ("accepted", first.tick + 120)
    again = [TickIn("chain", "src", each) for each in (first.tick, first.tick + 60, tick.tick)]
    assert [each.state for each in await accept_ticks(talk.ctx, again)] == ["known"] * 3
    assert states(await scheduler.round()) == []
    ran = await run_source(talk.ctx, "chain", "src", "tester")
    assert ran.tick > tick.tick
    if not code:
        lease = await talk.lease("work")
        assert (lease.read.after, lease.read.upto) == (tick.tick - 1, ran.tick), (
            "the stray tick is invalidated"
        )

    # The stray tick exists: it isn't made again when its time has come.
    await talk.pass_time(400 * DAY - 120)
    assert [each.state for each in await accept_ticks(talk.ctx, [TickIn("chain", "src", stray.tick)])] == [
        "known"
    ]
    await talk.pass_time(60)
    assert states(await scheduler.round()) == ["accepted"]


async def test_ticks_of_a_clock_that_was_ahead_are_no_obstacle_to_a_new_deploy(talk: Conversation) -> None:
    await talk.deploy(PLAIN)
    scheduler = Scheduler(talk.ctx)
    await talk.pass_time(400 * DAY)
    other = dag(cron(schedule="*/2 * * * *"), reactive("work", "src", strategy="PerUpdate"))
    await talk.deploy(other)
    await talk.pass_time(120)
    assert states(await scheduler.round()) == ["accepted"]
    await talk.pass_time(-400 * DAY)
    await talk.pass_time(180)
    assert states(await scheduler.round()) == [], "the deploy is in the future"
    # Deployed again, be it unchanged or after it was away, its ticks are due from now on.
    await talk.deploy(other)
    await talk.pass_time(120)
    assert states(await scheduler.round()) == ["accepted"]
    await talk.deploy(dag(source("other"), reactive("work", "other")))
    await talk.deploy(PLAIN)
    await talk.pass_time(60)
    assert states(await scheduler.round()) == ["accepted"]


async def test_a_new_schedule_begins_at_its_deploy_and_keeps_the_datasets(talk: Conversation) -> None:
    await talk.deploy(PLAIN)
    scheduler, version = Scheduler(talk.ctx), (await talk.output("src"))["dataset_version"]
    await talk.pass_time(61)
    await scheduler.round()
    await talk.pass_time(HOUR)
    changed = dag(cron(schedule="*/2 * * * *", catch_up="all"), reactive("work", "src", strategy="PerUpdate"))
    await talk.deploy(changed)
    assert states(await scheduler.round()) == []
    await talk.pass_time(240)
    assert states(await scheduler.round()) == ["accepted"] * 2
    assert (await talk.output("src"))["dataset_version"] == version
    # Deploying something else of the file changes nothing about its ticks.
    await talk.pass_time(240)
    more = reactive("more", "src", strategy="PerUpdate")
    await talk.deploy(
        dag(cron(schedule="*/2 * * * *", catch_up="all"), reactive("work", "src", strategy="PerUpdate"), more)
    )
    assert states(await scheduler.round()) == ["accepted"] * 2
    # Away for a while: what would have been its ticks are none.
    await talk.deploy(dag(source("other"), reactive("work", "other")))
    await talk.pass_time(HOUR)
    await talk.deploy(changed)
    assert states(await scheduler.round()) == []


async def ticked(talk: Conversation, count: int = 1) -> list[int]:
    scheduler, made = Scheduler(talk.ctx), []
    for _ in range(count):
        await talk.pass_time(60)
        made += [tick.tick for tick in (await scheduler.round()).sent]
    return made


async def test_a_source_with_code_gets_a_task_per_tick_and_sends_its_events_itself(
    talk: Conversation,
) -> None:
    await talk.deploy(dag(cron(**CODE), reactive("work", "src", strategy="PerUpdate")))
    ticks = await ticked(talk, 2)
    assert len(await talk.queued("src")) == 2
    assert await talk.events() == []
    first, second = await talk.queued("src")
    lease = await talk.lease(first)
    assert lease.payload.source == PayloadSource("cron", tick=ticks[0])
    await talk.emit(lease, EventIn(await talk.dataset("src"), cursor=7))
    assert len(await talk.queued("work")) == 1
    await talk.complete(lease)
    assert await talk.status(first) == "Completed"
    # The other one fails, is retried by the Dispatcher, and is still about its own tick.
    lease = await talk.lease(second)
    await talk.fail(lease)
    await retry_task(talk.ctx, second)
    lease = await talk.lease(second)
    assert (lease.attempt, lease.payload.source) == (2, PayloadSource("cron", tick=ticks[1]))
    await talk.fail(lease, retryable=False)
    assert await talk.status(second) == "Failed"
    row = await talk.task(second)
    assert row["cause"] == {"kind": "cron", "number": ticks[1]}


async def test_a_task_of_a_source_is_unique_per_tick_and_capped_as_others_are(talk: Conversation) -> None:
    await talk.deploy(dag(cron(**CODE, scaling={"max_concurrency": 1}, catch_up="all")))
    await talk.pass_time(300)
    scheduler = Scheduler(talk.ctx)
    await scheduler.round()
    await scheduler.round()
    queued = await talk.queued("src")
    assert len(queued) == 5
    lease = await talk.lease(queued[0])
    assert (await talk.claim(queued[1])).reason == "NotReady"
    await talk.forget_wakes()
    await talk.complete(lease)
    assert await talk.due_wakes() == [queued[1]]


@pytest.mark.parametrize("code", [False, True])
async def test_a_paused_source_keeps_ticks_and_routes_them_in_order_when_it_is_released(
    talk: Conversation, code: bool
) -> None:
    fields = CODE if code else {}
    await talk.deploy(dag(cron(**fields), reactive("work", "src", strategy="PerUpdate")))
    await pause_job(talk.ctx, "chain", "src")
    ticks = await ticked(talk, 3)
    assert len(ticks) == 3
    await release(talk)
    assert [row["state"] for row in await talk.events()] == ([] if code else ["held"] * 3)
    assert await talk.queued("src") == await talk.queued("work") == []
    await resume_job(talk.ctx, "chain", "src")
    # One that comes before the others are routed waits behind them.
    ticks += await ticked(talk)
    assert (await listed(talk)).waiting == 4
    await release(talk)
    await release(talk)
    assert (await listed(talk)).waiting == 0
    if code:
        leases = [await talk.lease(task_id) for task_id in await talk.queued("src")]
        assert [tick_of(lease) for lease in leases] == ticks
    else:
        found = [(row["range_end"], row["state"]) for row in await talk.events()]
        assert found == [(tick, "counted") for tick in ticks]
        assert (await talk.lease("work")).read.upto == ticks[-1]


async def release(talk: Conversation) -> None:
    """What the Dispatcher's loops do after a resume."""
    while (await balance(talk.ctx)).more:
        pass
    await route_waiting(talk.ctx)


async def listed(talk: Conversation) -> SourceSummary:
    page = await talk.ctx.db.run(lambda tx: sources.page(tx, talk.ctx.org_id, "", 10, datetime.now(UTC)))
    return next(each for each in page.sources if each.job == "src")


def tick_of(lease: Lease) -> int:
    assert lease.payload.source is not None
    assert isinstance(lease.payload.source.tick, int)
    return lease.payload.source.tick


async def test_a_redeploy_loses_no_tick_and_repeats_none(talk: Conversation) -> None:
    def file(setting: int) -> str:
        return dag(cron(**CODE, config={"setting": setting}))

    await talk.deploy(file(1))
    ticks = await ticked(talk, 3)
    done, running, waiting = await talk.queued("src")
    await talk.complete(await talk.lease(done))
    lease = await talk.lease(running)
    await talk.deploy(file(2))
    assert await talk.status(waiting) == "Canceled"
    await route_waiting(talk.ctx)
    # Only what hadn't begun is for the new generation; what runs ends where it began.
    [anew] = await talk.queued("src")
    await talk.complete(lease)
    # Rolled back before it began, it is the old generation's again, and the same task.
    await talk.deploy(file(1))
    assert await talk.status(anew) == "Canceled"
    await route_waiting(talk.ctx)
    assert await talk.queued("src") == [waiting]
    last = await talk.lease(waiting)
    assert tick_of(last) == ticks[2]
    await talk.complete(last)
    await talk.deploy(file(2))
    await route_waiting(talk.ctx)
    assert await talk.queued("src") == []


async def test_a_manual_source_with_code_gets_a_task_per_trigger(talk: Conversation) -> None:
    await talk.deploy(dag(source(**CODE), reactive("work", "src")))
    answer = await talk.trigger(5, 9)
    assert (answer.event_id, answer.tasks_created, answer.kept) == (None, 1, False)
    await talk.trigger()
    first, second = [await talk.lease(task_id) for task_id in await talk.queued("src")]
    assert first.payload.source is not None
    assert second.payload.source is not None
    request, bare = first.payload.source.request, second.payload.source.request
    assert (request.number, request.start, request.end) == (1, 5, 9)  # type: ignore[union-attr]
    assert (bare.number, bare.cursor) == (2, None)  # type: ignore[union-attr]
    with pytest.raises(Invalid):
        await talk.trigger(9, 5)
    assert await talk.events() == []


async def test_a_paused_manual_source_keeps_triggers(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    await pause_job(talk.ctx, "chain", "src")
    kept = [await talk.trigger(n, n) for n in (3, 1, 2)]
    assert [each.kept for each in kept] == [True] * 3
    with pytest.raises(Invalid):
        await talk.trigger()
    assert await talk.queued("work") == []
    await resume_job(talk.ctx, "chain", "src")
    assert (await talk.trigger(0, 0)).kept, "behind those that wait"
    await release(talk)
    assert [row["range_start"] for row in await talk.events()] == [3, 1, 2, 0]
    assert len(await talk.queued("work")) == 4
    assert not (await talk.trigger(7, 7)).kept


async def test_a_person_runs_a_cron_source_now_and_its_schedule_goes_on(talk: Conversation) -> None:
    await talk.deploy(dag(cron(schedule="0 3 * * *"), reactive("work", "src", strategy="PerUpdate")))
    ran = await run_source(talk.ctx, "chain", "src", "tester")
    assert (ran.kept, ran.tasks_created) == (False, 1)
    await talk.pass_time(-10)
    with pytest.raises(Conflict, match="or a later one"):
        await run_source(talk.ctx, "chain", "src", "tester")
    await talk.pass_time(25 * HOUR)
    [tick] = (await Scheduler(talk.ctx).round()).sent
    assert tick.tick > ran.tick
    with pytest.raises(Conflict, match="not a cron source"):
        await run_source(talk.ctx, "chain", "work", "tester")


async def test_a_tick_whose_attempt_ends_after_a_redeploy_goes_to_the_new_generation(
    talk: Conversation,
) -> None:
    def file(setting: int) -> str:
        return dag(cron(**CODE, config={"setting": setting}))

    await talk.deploy(file(1))
    ticks = await ticked(talk, 2)
    released, failed = [await talk.lease(task_id) for task_id in await talk.queued("src")]
    await talk.deploy(file(2))
    # A worker that leaves, and one whose attempt would have been retried: neither may lose its tick.
    await talk.complete(released, status="Released")
    await talk.fail(failed)
    await route_waiting(talk.ctx)
    assert len(await talk.queued("src")) == 2
    # Rolled back, they are the old generation's tasks again, the failed one as well.
    await talk.deploy(file(1))
    await route_waiting(talk.ctx)
    again = [await talk.lease(task_id) for task_id in await talk.queued("src")]
    assert [tick_of(lease) for lease in again] == ticks
    assert [lease.task_id for lease in again] == [released.task_id, failed.task_id]


@pytest.mark.parametrize("code", [False, True])
async def test_events_kept_for_a_held_source_go_to_the_generation_that_replaces_it(
    talk: Conversation, code: bool
) -> None:
    def file(**fields: Any) -> str:
        return dag(cron(**fields), reactive("work", "src", strategy="PerUpdate"))

    await talk.deploy(file())
    await pause_job(talk.ctx, "chain", "src")
    ticks = await ticked(talk, 3)
    await talk.deploy(file(**CODE) if code else file(outputs=[{"name": "ticks"}]))
    await release(talk)
    assert (await listed(talk)).waiting == 0
    if code:
        leases = [await talk.lease(task_id) for task_id in await talk.queued("src")]
        assert [tick_of(lease) for lease in leases] == ticks
    else:
        found = [(row["range_end"], row["state"]) for row in await talk.events()]
        assert found == [(tick, "counted") for tick in ticks]
        assert (await talk.lease("work")).read.upto == ticks[-1]


async def test_a_tick_that_a_person_makes_loses_none_that_the_schedulers_have_missed(
    talk: Conversation,
) -> None:
    await talk.deploy(dag(cron(**CODE, catch_up="all")))
    await talk.pass_time(305)
    ran = await run_source(talk.ctx, "chain", "src", "tester")
    ticks = [tick_of(await talk.lease(task_id)) for task_id in await talk.queued("src")]
    assert (len(ticks), ticks[-1]) == (6, ran.tick)
    assert [tick % 60 for tick in ticks[:-1]] == [0] * 5
    assert states(await Scheduler(talk.ctx).round()) == []


@pytest.mark.parametrize("late", [60, 250 * 60])
async def test_no_tick_becomes_due_unnoticed_while_a_person_makes_one(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    await talk.deploy(dag(cron(catch_up="all"), reactive("work", "src", strategy="PerUpdate")))
    await talk.pass_time(late - 12)
    find = jobs.active

    async def slow(tx: Transaction, dag_name: str, name: str) -> ActiveJob:
        monkeypatch.setattr(jobs, "active", find)
        await talk.pass_time(4)
        return await find(tx, dag_name, name)

    monkeypatch.setattr(jobs, "active", slow)
    ran = await run_source(talk.ctx, "chain", "src", "tester")
    minutes = late // 60
    ticks = [row["range_end"] for row in await talk.events()]
    assert (len(ticks), ticks[-1]) == (minutes + 1, ran.tick)
    assert [tick - ticks[0] for tick in ticks[:-1]] == [60 * n for n in range(minutes)]
    assert len(await talk.query("SELECT 1 FROM audit WHERE action = 'run source'")) == 1


async def bulk_trigger(talk: Conversation, number: int) -> TriggerResponse:
    request = TriggerRequest(start=number, end=number, priority="bulk")
    return await trigger_source(talk.ctx, "chain", "src", request)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_bulk_trigger_of_a_source_with_code_is_a_bulk_task(talk: Conversation, paused: bool) -> None:
    await talk.deploy(dag(source(**CODE), reactive("work", "src")))
    if paused:
        await pause_job(talk.ctx, "chain", "src")
    assert (await bulk_trigger(talk, 1)).kept is paused
    assert (await talk.trigger(2, 2)).kept is paused
    if paused:
        await resume_job(talk.ctx, "chain", "src")
        await release(talk)
    bulk, normal = await talk.queued("src")
    assert [(await talk.task(task_id))["bulk"] for task_id in (bulk, normal)] == [True, False]
    wakes = {row["task_id"]: bool(row["payload"].get("bulk")) for row in await talk.all_wakes()}
    assert (wakes[bulk], wakes[normal]) == (True, False)
    # What follows from it is bulk as well.
    lease = await talk.lease(bulk)
    await talk.emit(lease, EventIn(await talk.dataset("src"), start=1, end=1))
    assert (await talk.task(await talk.only_queued("work")))["bulk"]


@pytest.mark.parametrize("code", [False, True])
async def test_a_kept_bulk_trigger_is_bulk_in_the_generation_that_replaces_its_source(
    talk: Conversation, code: bool
) -> None:
    def file(**fields: Any) -> str:
        return dag(source(**fields), reactive("work", "src"))

    before, after = ({}, CODE) if code else (CODE, {})
    await talk.deploy(file(**before))
    await pause_job(talk.ctx, "chain", "src")
    assert (await bulk_trigger(talk, 1)).kept
    assert (await talk.trigger(2, 2)).kept
    await talk.deploy(file(**after))
    await release(talk)
    tasks = [await talk.task(task_id) for task_id in await talk.queued("src" if code else "work")]
    assert [row["bulk"] for row in tasks] == [True, False]


async def test_a_job_of_bulk_priority_wakes_its_requests_as_bulk(talk: Conversation) -> None:
    await talk.deploy(dag(source(**CODE, priority="bulk"), reactive("work", "src")))
    await talk.trigger(1, 1)
    [wake] = await talk.all_wakes()
    assert wake["payload"]["bulk"]
