"""Backpressure end to end through the steps: holds, releases, what is kept meanwhile, and what claims hear."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from tests.support.conversation import Conversation, Lease, dag, lease_of, reactive, source, taken_back
from tests.support.databases import ORG
from tracelake.contracts.dispatcher_api import ClaimRequest, EventIn, TriggerRequest
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.apply_backpressure import balance, drain
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import pause_job, resume_job
from tracelake.dispatcher.steps.upkeep import reconcile_partitions
from tracelake.store import jobs, outbox, pressure, reads, sources
from tracelake.store.db import OutboxEntry


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


def chain(depth: int = 2, **fields: Any) -> str:
    """src → up → down, with a threshold on the last."""
    return dag(source(), reactive("up", "src"), reactive("down", "up", max_queue_depth=depth, **fields))


async def settle(talk: Conversation) -> None:
    """Look until nothing changes."""
    for _ in range(50):
        found = await balance(talk.ctx)
        if not found.changed and not found.more:
            return
    raise AssertionError("it doesn't settle")


async def fill(talk: Conversation, scopes: int, job: str = "up", first: int = 0) -> None:
    """Run that many scopes through ``job``, so that its consumers have them to do."""
    for number in range(first, first + scopes):
        await talk.trigger(number, number)
        await talk.run(job)


async def held(talk: Conversation) -> set[tuple[str, str, bool]]:
    rows = await talk.query(
        "SELECT j.name, p.cause, p.bulk_only FROM job_pause p JOIN job j USING (job_id) WHERE caused_by IS NOT NULL"
    )
    return {(row["name"], row["cause"], row["bulk_only"]) for row in rows}


async def test_a_full_queue_holds_everything_upstream_until_it_is_half_empty(talk: Conversation) -> None:
    await talk.deploy(chain(4))
    await fill(talk, 4)
    await talk.trigger(100, 100)
    waiting = await talk.only_queued("up")
    await settle(talk)
    why = "backpressure of chain/down"
    assert await held(talk) == {("src", why, False), ("up", why, False)}
    answer = await talk.claim(waiting)
    assert (answer.status, answer.reason) == ("NotClaimed", "NotReady")
    assert (await talk.trigger(101, 101)).tasks_created == 0
    await talk.forget_wakes()

    await talk.pass_time(6)
    for task in (await talk.queued("down"))[:2]:
        await talk.complete_scope(await talk.lease(task))
    await settle(talk)
    assert len(await held(talk)) == 2, "two of four wait: that is the low mark, not below it"
    await talk.complete_scope(await talk.lease((await talk.queued("down"))[0]))
    await settle(talk)
    assert await held(talk) == set()
    assert len(await talk.queued("up")) == 2, "the kept event was routed"
    assert set(await talk.due_wakes()) == set(await talk.queued("up")), "and the refused task woken"
    await talk.complete_scope(await talk.lease(waiting))


async def test_kept_events_are_routed_once_and_no_faster_than_there_is_room(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("down", "src", max_queue_depth=3)))
    for number in range(3):
        assert (await talk.trigger(number, number)).tasks_created == 1
    await settle(talk)
    for number in range(3, 13):
        assert (await talk.trigger(number, number)).tasks_created == 0
    assert {row["state"] for row in await talk.events()} == {"counted", "held"}
    done = []
    while queued := await talk.queued("down"):
        assert len(queued) <= 3
        lease = await talk.lease(queued[0])
        done.append(lease.read.start)
        await talk.complete_scope(lease)
        await talk.pass_time(6)
        await settle(talk)
    assert set(done) == set(range(13))
    assert len(done) == 13
    assert {row["state"] for row in await talk.events()} == {"counted"}


async def test_a_burst_from_outside_fills_no_queue_beyond_its_threshold(talk: Conversation) -> None:
    """Before any look: events are accepted one after the other, and then by several at once."""
    await talk.deploy(dag(source(), reactive("down", "src", max_queue_depth=3)))
    assert sum([(await talk.trigger(number, number)).tasks_created for number in range(8)]) == 3
    assert await kept_scopes(talk) == [3, 4, 5, 6, 7]
    done = []
    while queued := await talk.queued("down"):
        assert len(queued) <= 3
        lease = await talk.lease(queued[0])
        done.append(lease.read.start)
        await talk.complete_scope(lease)
        await talk.pass_time(6)
        await settle(talk)
    assert done == list(range(8)), "in the order of the events, each once"


async def test_calls_that_overlap_fill_a_queue_by_no_more_than_one_task_each(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("down", "src", max_queue_depth=3)))
    numbers = iter(range(80))

    async def post() -> None:
        for number in numbers:
            await talk.trigger(number, number)

    callers = 8
    await asyncio.gather(*(post() for _ in range(callers)))
    assert 3 <= len(await talk.queued("down")) < 3 + callers
    assert len(await talk.queued("down")) + len(await kept_scopes(talk)) == 80


async def test_a_cursor_that_completes_many_scopes_fills_no_queue_beyond_its_threshold(
    talk: Conversation,
) -> None:
    await talk.deploy(dag(source(), source("head"), reactive("join", "src", "head", max_queue_depth=3)))
    for number in range(9):
        await talk.trigger(number, number)
    assert (await talk.trigger(cursor=8, job="head")).tasks_created == 3
    assert len(await kept_scopes(talk)) == 6


async def test_normal_work_from_outside_goes_on_while_a_queue_holds_bulk_work_only(
    talk: Conversation,
) -> None:
    await talk.deploy(
        dag(
            source(),
            source("other"),
            reactive("bulk", "other", priority="bulk"),
            reactive("down", "src", "bulk", max_queue_depth=2),
        )
    )
    for number in range(6):
        await talk.trigger(number, number, job="other")
        await talk.run("bulk")
    assert [(await talk.trigger(number, number)).tasks_created for number in range(3)] == [1, 1, 0]
    await settle(talk)
    assert ("src", "backpressure of chain/down", True) in await held(talk)
    assert await kept_scopes(talk) == [2]
    await talk.complete_scope(await talk.lease((await talk.queued("down"))[0]))
    # In this order: the source finds the queue full, and nothing kept that would wait for room in it.
    for job in ("down", "src"):
        [row] = await talk.query("SELECT job_id FROM job WHERE name = $1", job)
        while await drain(talk.ctx, row["job_id"]):
            pass
    assert await kept_scopes(talk) == []
    assert [(await talk.trigger(number, number)).tasks_created for number in range(3, 6)] == [1, 1, 0]


async def test_what_a_running_task_emits_for_a_held_job_is_kept(talk: Conversation) -> None:
    await talk.deploy(
        dag(source(), reactive("a", "src"), reactive("b", "a"), reactive("c", "b", max_queue_depth=1))
    )
    await talk.trigger(0, 0)
    await talk.run("a")
    for number in (1, 2):
        await talk.trigger(number, number)
    running = [await talk.lease(task) for task in await talk.queued("a")]
    await talk.run("b")
    await settle(talk)
    for lease in running:
        await talk.complete_scope(lease)
    assert await talk.queued("b") == [], "it is held"
    assert await reconcile_partitions(talk.ctx) == 0
    await talk.pass_time(6)
    await talk.run("c")
    await settle(talk)
    assert len(await talk.queued("b")) == 2
    await settle(talk)
    assert len(await talk.queued("b")) == 2


async def test_bulk_goes_first_and_comes_back_last(talk: Conversation) -> None:
    await talk.deploy(
        dag(
            source(),
            reactive("bulk", "src", priority="bulk"),
            reactive("tip", "src"),
            reactive("down", "bulk", "tip", max_queue_depth=4),
        )
    )
    for number in range(4):
        await talk.trigger(number, number)
        await talk.run("bulk")
        await talk.run("tip")
    await settle(talk)
    why = "backpressure of chain/down"
    assert await held(talk) == {("bulk", why, False), ("src", why, True), ("tip", why, True)}
    assert (await talk.trigger(50, 50)).tasks_created == 1, "bulk gets none"
    await talk.pass_time(31)
    await settle(talk)
    assert ("tip", why, False) in await held(talk)
    for task in await talk.queued("down"):
        await talk.complete_scope(await talk.lease(task))
    await talk.pass_time(6)
    await settle(talk)
    assert ("tip", why, True) in await held(talk)
    assert ("bulk", why, False) in await held(talk)
    await talk.pass_time(6)
    await settle(talk)
    assert await held(talk) == set()
    assert len(await talk.queued("bulk")) == 1


async def test_bulk_work_of_a_normal_job_is_held_alone(talk: Conversation) -> None:
    await talk.deploy(chain(2))

    async def trigger(number: int, priority: Any) -> int:
        request = TriggerRequest(start=number, end=number, priority=priority)
        return (await trigger_source(talk.ctx, "chain", "src", request)).tasks_created

    for number in range(3):
        assert await trigger(number, "bulk") == 1
    backfill = await talk.queued("up")
    for task in backfill[:2]:
        await talk.complete_scope(await talk.lease(task))
    assert {row["bulk"] for row in await talk.query("SELECT bulk FROM task")} == {True}, "it is passed on"
    await settle(talk)
    assert (await talk.claim(backfill[2])).reason == "NotReady"
    assert await trigger(3, "bulk") == 0
    assert await trigger(4, "normal") == 1
    [tip] = set(await talk.queued("up")) - set(backfill)
    await talk.complete_scope(await talk.lease(tip))


async def test_an_old_queue_holds_as_a_full_one_does(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("up", "src"), reactive("down", "up", max_queue_age="1m")))
    await fill(talk, 1)
    found = await balance(talk.ctx)
    assert found.look_again is not None
    assert 50 < found.look_again <= 60
    await talk.pass_time(61)
    await settle(talk)
    assert {job for job, _, _ in await held(talk)} == {"src", "up"}
    await talk.run("down")
    await talk.pass_time(6)
    await settle(talk)
    assert await held(talk) == set()


async def test_a_clock_that_is_set_back_releases_after_the_least_time_as_ever(talk: Conversation) -> None:
    await talk.deploy(chain(1))
    await fill(talk, 1)
    await talk.pass_time(86_400)
    await settle(talk)
    assert {job for job, _, _ in await held(talk)} == {"src", "up"}
    await talk.run("down")
    await talk.pass_time(-86_400)
    found = await balance(talk.ctx)
    assert {job for job, _, _ in await held(talk)} == {"src", "up"}
    assert found.look_again is not None
    assert found.look_again <= 5
    [trip] = await talk.query("SELECT greatest(since, changed_at) <= tl_now() AS has_come FROM pressure")
    assert trip["has_come"]
    await talk.pass_time(6)
    await settle(talk)
    assert await held(talk) == set()


async def test_a_pause_and_several_holds_are_lifted_one_by_one(talk: Conversation) -> None:
    await talk.deploy(
        dag(
            source(),
            reactive("up", "src"),
            reactive("left", "up", max_queue_depth=1),
            reactive("right", "up", max_queue_depth=1),
        )
    )
    await fill(talk, 1)
    await settle(talk)
    await talk.trigger(9, 9)
    await pause_job(talk.ctx, "chain", "src", "tester")
    assert len(await held(talk)) == 4
    await talk.pass_time(6)
    await talk.run("left")
    await settle(talk)
    assert {cause for _, cause, _ in await held(talk)} == {"backpressure of chain/right"}
    await talk.run("right")
    await settle(talk)
    assert await held(talk) == set()
    assert await talk.queued("up") == [], "a person has paused its source"
    assert await resume_job(talk.ctx, "chain", "src", "tester") is False
    await settle(talk)
    assert len(await talk.queued("up")) == 1


async def test_a_job_that_a_person_paused_holds_nobody(talk: Conversation) -> None:
    await talk.deploy(chain(1))
    await fill(talk, 1)
    await pause_job(talk.ctx, "chain", "down", "tester")
    await settle(talk)
    assert await held(talk) == set()


async def test_retries_that_wait_for_their_time_do_not_count(talk: Conversation) -> None:
    await talk.deploy(chain(1))
    await fill(talk, 1)
    await talk.fail(await talk.lease("down"))
    await settle(talk)
    assert await held(talk) == set()


async def test_what_is_kept_takes_the_room_of_retries_that_wait_for_their_time(talk: Conversation) -> None:
    await talk.deploy(
        dag(source(), reactive("down", "src", max_queue_depth=2, retry={"base": "10m", "max": "1h"}))
    )

    async def fail_all() -> None:
        for task in await talk.queued("down"):
            answer = await talk.claim(task)
            if answer.status == "Claimed":
                await talk.fail(lease_of(answer))

    for number in range(2):
        await talk.trigger(number, number)
    await settle(talk)
    for number in range(2, 9):
        await talk.trigger(number, number)
    await pause_job(talk.ctx, "chain", "down", "tester")
    await talk.pass_time(6)
    await settle(talk)
    assert await kept_scopes(talk) != [], "the job is paused, so its source goes on"
    await resume_job(talk.ctx, "chain", "down", "tester")
    for _ in range(20):
        await fail_all()
        await talk.pass_time(6)
        await settle(talk)
    assert len(await talk.queued("down")) == 9, (
        "all of them had their turn, and none is held back by the others"
    )
    assert await kept_scopes(talk) == []
    assert {row["state"] for row in await talk.events()} == {"counted"}
    report = await talk.ctx.db.run(lambda tx: pressure.report(tx, talk.ctx.pressure))
    assert report.backlogs == []


async def test_the_reconciler_gives_the_room_of_retries_too(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("down", "src", max_queue_depth=1)))
    await talk.trigger(0, 0)
    await talk.fail(await talk.lease("down"))
    [job] = await talk.query("SELECT job_id FROM job WHERE name = 'down'")
    assert await talk.ctx.db.run(lambda tx: jobs.room(tx, job["job_id"])) == 1


async def test_a_paused_consumer_does_not_keep_the_events_of_its_source(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("down", "src", max_queue_depth=1)))
    await talk.trigger(0, 0)
    await settle(talk)
    await talk.trigger(1, 1)
    await pause_job(talk.ctx, "chain", "down", "tester")
    await talk.pass_time(6)
    await settle(talk)
    assert {row["state"] for row in await talk.events()} == {"counted"}
    assert await kept_scopes(talk) == [1], "kept for the paused job itself, whose pause is the reason"


async def test_what_waits_for_room_says_so(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("down", "src", max_queue_depth=1)))
    await pause_job(talk.ctx, "chain", "down", "tester")
    for number in range(4):
        await talk.trigger(number, number)
    await resume_job(talk.ctx, "chain", "down", "tester")
    await settle(talk)
    report = await talk.ctx.db.run(lambda tx: pressure.report(tx, talk.ctx.pressure))
    [kept] = report.backlogs
    assert (kept.job, kept.kept, kept.full_job) == ("down", 3, "down")
    assert kept.message == "3 kept scopes of chain/down wait for room in its queue (1 of 1 waiting)"


async def test_a_source_whose_kept_events_wait_for_room_says_so(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("down", "src", max_queue_depth=4)))
    for number in range(4):
        await talk.trigger(number, number)
    await settle(talk)
    for number in range(4, 12):
        await talk.trigger(number, number)
    await talk.pass_time(6)
    for task in (await talk.queued("down"))[:3]:
        await talk.complete_scope(await talk.lease(task))
    await settle(talk)
    assert len(await held(talk)) == 1, "it was released, filled the queue, and is held again"
    await talk.query("DELETE FROM job_pause RETURNING 1")
    await talk.query("UPDATE job SET paused = false RETURNING 1")
    page = await talk.ctx.db.run(lambda tx: sources.page(tx, ORG, "", 10, datetime.now(UTC)))
    assert page.sources[0].waiting_for == (
        "5 kept events of chain/src wait for room in the queue of chain/down (4 of 4 waiting)"
    )


async def kept_scopes(talk: Conversation) -> list[int]:
    return [row["range_start"] for row in await talk.query("SELECT range_start FROM held_scope ORDER BY seq")]


async def test_a_task_whose_input_is_gone_does_not_hold_those_who_must_rebuild_it(talk: Conversation) -> None:
    await talk.deploy(chain(1))
    await fill(talk, 1)
    await talk.trigger(7, 7)
    rebuilding = await talk.lease("up")
    await settle(talk)
    await talk.emit(rebuilding, taken_back(await talk.dataset("up"), 0, 0))
    await talk.complete_scope(rebuilding)
    for task in await talk.queued("down"):
        answer = await talk.claim(task)
        if answer.status == "Claimed":
            await talk.pass_time(1)
    await talk.pass_time(6)
    await settle(talk)
    assert await held(talk) == set()


async def test_replicas_agree_and_a_restart_changes_nothing(talk: Conversation) -> None:
    await talk.deploy(chain(1))
    await fill(talk, 1)
    found = await asyncio.gather(*(balance(talk.ctx) for _ in range(4)))
    assert sum(len(each.changed) for each in found) == 2, "one of them acted"
    before = await held(talk)
    await balance(talk.ctx)
    assert await held(talk) == before


async def test_a_held_source_hears_it_with_its_next_events(talk: Conversation) -> None:
    await talk.deploy(
        dag(source(kind="always_on"), reactive("down", "src", strategy="PerUpdate", max_queue_age="1m"))
    )
    follower = await talk.lease("src")
    uuid = await talk.dataset("src")
    assert not (await talk.emit(follower, EventIn(dataset_uuid=uuid, cursor=1))).pause
    await talk.pass_time(61)
    await settle(talk)
    assert (await talk.emit(follower, EventIn(dataset_uuid=uuid, cursor=2))).pause
    assert (await talk.beat(follower)).pause
    lease = await talk.lease("down")
    assert lease.read.upto == 2
    await talk.pass_time(6)
    await settle(talk)
    assert not (await talk.beat(follower)).pause


async def test_the_report_and_a_task_tell_the_story(talk: Conversation) -> None:
    await talk.ctx.db.run(lambda tx: pressure.set_caps(tx, {"noop": 7}))
    await talk.deploy(chain(4, max_queue_age="10m"))
    await fill(talk, 5)
    await talk.trigger(100, 100)
    waiting = await talk.only_queued("up")
    await settle(talk)
    report = await talk.ctx.db.run(lambda tx: pressure.report(tx, talk.ctx.pressure))
    [job] = report.jobs
    assert (job.job, job.pressure, job.waiting, job.holds) == ("down", 1.25, 5, "normal")
    hold = next(each for each in report.holds if each.job == "src")
    assert hold.chain == ["chain/src", "chain/up", "chain/down"]
    assert (hold.released_below, hold.released_below_seconds) == (2, 300.0)
    assert hold.message.startswith("src is held by pressure of chain/down (5 of 4 waiting, oldest ")
    assert (
        "through up → down; released below 2 and when the oldest has waited for less than 5 min"
        in hold.message
    )
    assert 0 < hold.at_least_seconds <= 5
    assert hold.message.endswith(f", in {math.ceil(hold.at_least_seconds)} s at the earliest")
    assert [(each.operator, each.max_in_flight) for each in report.operators] == [("noop", 7)]
    detail = await talk.ctx.db.run(lambda tx: reads.task(tx, waiting))
    assert detail.waiting_for is not None
    assert (detail.waiting_for.reason, detail.waiting_for.message) == (
        "Backpressure",
        "backpressure of chain/down",
    )
    await talk.pass_time(6)
    report = await talk.ctx.db.run(lambda tx: pressure.report(tx, talk.ctx.pressure))
    assert {each.at_least_seconds for each in report.holds} == {0}
    assert not any("at the earliest" in each.message for each in report.holds)
    hold = report.holds[0]
    assert f", since {hold.since:%H:%M}, through" in hold.message
    await talk.pass_time(24 * 3600)
    report = await talk.ctx.db.run(lambda tx: pressure.report(tx, talk.ctx.pressure))
    assert f", since {hold.since:%Y-%m-%d %H:%M}Z, through" in report.holds[0].message


async def test_an_operator_is_capped_over_all_jobs_and_a_free_slot_goes_to_the_next(
    talk: Conversation,
) -> None:
    await talk.ctx.db.run(lambda tx: pressure.set_caps(tx, {"noop": 2}))
    await talk.deploy(dag(source(), reactive("a", "src"), reactive("b", "src")))
    for number in range(2):
        await talk.trigger(number, number)
    waiting = [*(await talk.queued("a")), *(await talk.queued("b"))]
    answers = await claim_tasks(talk.ctx, [ClaimRequest(task, "w1") for task in waiting])
    assert [answer.status for answer in answers] == ["Claimed", "Claimed", "NotClaimed", "NotClaimed"]
    detail = await talk.ctx.db.run(lambda tx: reads.task(tx, waiting[2]))
    assert detail.waiting_for is not None
    assert detail.waiting_for.reason == "OperatorFull"
    await talk.forget_wakes()
    await talk.complete_scope(lease_of(answers[0]))
    assert await talk.due_wakes() == [waiting[2]], "the oldest of another job"
    assert (await talk.claim(waiting[2])).status == "Claimed"
    assert (await talk.claim(waiting[3])).status == "NotClaimed"
    await talk.ctx.db.run(lambda tx: pressure.set_caps(tx, {}))
    assert (await talk.claim(waiting[3])).status == "Claimed"


@pytest.mark.parametrize("cap", ["job", "operator"])
async def test_a_bulk_task_gets_a_free_slot_once_it_has_waited_long_enough(
    talk: Conversation, cap: str
) -> None:
    """Of a full job, and of a full operator: behind normal tasks at first, and before newer ones in the end."""
    scaling = {"scaling": {"max_concurrency": 1}} if cap == "job" else {}
    if cap == "operator":
        await talk.ctx.db.run(lambda tx: pressure.set_caps(tx, {"noop": 1}))
    await talk.deploy(dag(source(), reactive("a", "src", **scaling)))

    async def parked(number: int, priority: Any) -> UUID:
        request = TriggerRequest(start=number, end=number, priority=priority)
        await trigger_source(talk.ctx, "chain", "src", request)
        [task] = set(await talk.queued("a")) - known
        known.add(task)
        assert (await talk.claim(task)).status == "NotClaimed"
        return task

    async def next_after(running: Lease) -> OutboxEntry:
        await talk.forget_wakes()
        await talk.complete_scope(running)
        [entry] = await talk.ctx.db.run(lambda tx: outbox.take_due(tx, 10, 30.0))
        return entry

    known: set[UUID] = set()
    await talk.trigger(0, 0)
    running = await talk.lease("a")
    bulk, first = await parked(1, "bulk"), await parked(2, "normal")
    await talk.pass_time(talk.ctx.pressure.max_bulk_wait.total_seconds() / 2)
    entry = await next_after(running)
    assert entry.task_id == first
    running = await talk.lease(first)
    await talk.pass_time(talk.ctx.pressure.max_bulk_wait.total_seconds())
    await parked(3, "normal")
    entry = await next_after(running)
    assert entry.task_id == bulk
    assert entry.behind(talk.ctx.pressure.max_bulk_wait.total_seconds()) == 0, (
        "nor does it wait in the queue again"
    )


async def test_a_new_bulk_task_waits_behind_normal_ones(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("a", "src", priority="bulk"), reactive("b", "src")))
    await talk.trigger(0, 0)
    [bulk] = await talk.queued("a")
    entries = await talk.ctx.db.run(lambda tx: outbox.take_due(tx, 10, 30.0))
    assert len(entries) == 2
    for entry in entries:
        assert entry.behind(600) == pytest.approx(600 if entry.task_id == bulk else 0, abs=60)
