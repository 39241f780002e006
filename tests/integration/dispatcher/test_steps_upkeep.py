"""What keeps things going: pause and resume, the reconciler, re-wakes, the source monitor, the outbox."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.support.conversation import Conversation, dag, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.contracts.user_api import DagPage, DagQuery
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import pause_job, resume_job
from tracelake.dispatcher.steps.upkeep import PAGE, reconcile_partitions, rewake_queued, watch_sources
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import NotFound
from tracelake.store import outbox, reads
from tracelake.store.db import DeployLock, Transaction


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


BOTH = (reactive("work", "src"), reactive("up", "src", strategy="PerUpdate"))


async def pause(talk: Conversation, job: str, paused: bool = True) -> None:
    await (pause_job if paused else resume_job)(talk.ctx, "chain", job)


async def test_a_paused_job_gets_no_tasks_and_loses_no_events(talk: Conversation) -> None:
    await talk.deploy(dag(source(), *BOTH))
    for job in ("work", "up"):
        await pause(talk, job)
    assert (await talk.trigger(0, 9)).tasks_created == 0
    assert await reconcile_partitions(talk.ctx) == 0
    await pause(talk, "up", False)
    assert (await talk.lease("up")).read.upto == 9
    await pause(talk, "work", False)
    assert await reconcile_partitions(talk.ctx) == 1
    await talk.run("work")


async def test_a_resume_wakes_what_had_waited(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    await talk.trigger(0, 9)
    await pause(talk, "work")
    await talk.forget_wakes()
    await pause(talk, "work")
    assert await talk.due_wakes() == []
    await pause(talk, "work", False)
    assert await talk.due_wakes() == [await talk.only_queued("work")]
    await talk.forget_wakes()
    await pause(talk, "work", False)
    assert await talk.due_wakes() == [], "it was not paused"
    with pytest.raises(NotFound):
        await pause(talk, "nobody")


async def test_a_job_goes_on_when_the_last_cause_of_its_pause_is_gone(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    await talk.trigger(0, 9)
    task = await talk.only_queued("work")
    await pause_job(talk.ctx, "chain", "work", "ada")
    await talk.query(
        "INSERT INTO job_pause (job_id, cause) SELECT job_id, 'storage' FROM job WHERE name = 'work'"
    )
    assert await pauses(talk, "work") == (True, "ada", ["person", "storage"])
    await talk.forget_wakes()
    assert await resume_job(talk.ctx, "chain", "work") is True
    assert await talk.due_wakes() == []
    assert (await talk.claim(task)).reason == "NotReady"
    assert await pauses(talk, "work") == (True, None, ["storage"])
    await talk.query("DELETE FROM job_pause WHERE cause = 'storage'")
    assert await resume_job(talk.ctx, "chain", "work") is False
    assert await talk.due_wakes() == [task]
    assert await pauses(talk, "work") == (False, None, [])


async def pauses(talk: Conversation, name: str) -> tuple[bool, str | None, list[str]]:
    """Whether a job is paused, by whom and why, as people see it."""

    async def work(tx: Transaction) -> DagPage:
        return await reads.dags(tx, DagQuery())

    [found] = (await talk.ctx.db.run(work, lock=DeployLock.NONE)).dags
    [job] = [job for job in found.jobs if job.name == name]
    return job.paused, job.paused_by, job.pause_causes


async def test_a_waiting_task_names_the_cause_of_its_jobs_pause(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    await talk.trigger(0, 9)
    task = await talk.only_queued("work")
    await pause_job(talk.ctx, "chain", "work")
    detail = await talk.ctx.db.run(lambda tx: reads.task(tx, task), lock=DeployLock.NONE)
    assert detail.waiting_for is not None
    assert (detail.waiting_for.reason, detail.waiting_for.message) == (
        "JobPaused",
        "its job is paused by system (cause: person)",
    )


async def test_a_running_task_of_a_paused_job_may_finish(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src"), reactive("next", "work")))
    await talk.trigger(0, 9)
    lease = await talk.lease("work")
    await pause(talk, "work")
    await talk.complete_scope(lease)
    await talk.only_queued("next")


async def test_a_job_added_after_its_input_had_data_is_caught_up(talk: Conversation) -> None:
    await talk.deploy(dag(source()))
    for start in (0, 10, 20):
        await talk.trigger(start, start + 9)
    await talk.deploy(dag(source(), *BOTH))
    assert await talk.queued("work") == []
    await talk.forget_wakes()
    assert await reconcile_partitions(talk.ctx) == 4
    assert len(await talk.queued("work")) == 3
    assert len(await talk.due_wakes()) == 4
    assert (await talk.lease("up")).read.upto == 29
    assert await reconcile_partitions(talk.ctx) == 0


async def test_a_job_added_after_a_cursor_is_caught_up(talk: Conversation) -> None:
    await talk.deploy(dag(source()))
    await talk.trigger(cursor=7)
    await talk.deploy(dag(source(), *BOTH))
    assert await reconcile_partitions(talk.ctx) == 1
    assert (await talk.lease("up")).read.upto == 7


async def test_the_reconciler_reads_page_by_page_to_the_end(talk: Conversation) -> None:
    await talk.deploy(dag(source(kind="always_on")))
    lease, uuid = await talk.lease("src"), await talk.dataset("src")
    for first in range(0, PAGE + 200, 600):
        await talk.emit(lease, *(EventIn(uuid, start=n, end=n) for n in range(first, first + 600)))
    await talk.deploy(dag(source(kind="always_on"), reactive("work", "src")))
    assert await reconcile_partitions(talk.ctx) == PAGE + 200
    assert await reconcile_partitions(talk.ctx) == 0


async def test_the_reconciler_joins_only_what_all_inputs_have(talk: Conversation) -> None:
    await talk.deploy(dag(source("a"), source("b")))
    for start in (0, 10):
        await talk.trigger(start, start + 9, job="a")
    await talk.trigger(0, 9, job="b")
    await talk.deploy(dag(source("a"), source("b"), reactive("join", "a", "b")))
    assert await reconcile_partitions(talk.ctx) == 1


async def test_what_was_canceled_or_failed_is_not_brought_back(talk: Conversation) -> None:
    await talk.deploy(dag(source(), *BOTH))
    await talk.trigger(0, 9)
    await talk.cancel(await talk.only_queued("work"))
    await talk.fail(await talk.lease("up"), retryable=False)
    assert await reconcile_partitions(talk.ctx) == 0
    await talk.trigger(10, 19)
    await talk.only_queued("work")
    assert (await talk.lease("up")).read.after == -1, "something newer came: all is read"


async def test_what_failed_is_asked_for_again_at_a_newer_revision(talk: Conversation) -> None:
    await talk.deploy(dag(source(kind="always_on"), reactive("work", "src")))
    head, uuid = await talk.lease("src"), await talk.dataset("src")
    scope = EventIn(uuid, start=0, end=9)
    await talk.emit(head, scope)
    await talk.fail(await talk.lease("work"), retryable=False)
    await talk.emit(head, taken_back(uuid, 0, 9), scope)
    await talk.only_queued("work")


async def test_invariant_4_with_every_message_lost_what_waits_is_woken_again(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    await talk.trigger(0, 9)
    task = await talk.only_queued("work")
    await talk.forget_wakes()
    assert await rewake_queued(talk.ctx, 60) == 0, "it was woken just now"
    await talk.pass_time(61)
    assert await rewake_queued(talk.ctx, 60) == 1
    assert await talk.due_wakes() == [task]
    assert await rewake_queued(talk.ctx, 60) == 0
    await talk.pass_time(61)
    await talk.lease(task)
    assert await rewake_queued(talk.ctx, 60) == 0


async def test_only_what_may_run_is_woken_again(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src", retry={"base": 500, "max": 500})))
    await talk.trigger(0, 9)
    await talk.fail(await talk.lease("work"))
    await talk.trigger(10, 19)
    await talk.pass_time(100)
    assert await rewake_queued(talk.ctx, 60) == 1, "the other one waits for its retry time"
    await pause(talk, "work")
    await talk.pass_time(10_000)
    assert await rewake_queued(talk.ctx, 60) == 0


async def test_a_source_has_its_task_from_the_deploy_on(talk: Conversation) -> None:
    await talk.deploy(dag(source(kind="always_on")))
    task = await talk.only_queued("src")
    assert await talk.due_wakes() == [task]
    assert await watch_sources(talk.ctx) == 0


async def test_the_monitor_gives_a_source_without_a_task_one(talk: Conversation) -> None:
    await talk.deploy(dag(source(kind="always_on"), source("hand")))
    await talk.query("DELETE FROM task")
    await talk.forget_wakes()
    assert await watch_sources(talk.ctx) == 1
    assert await talk.due_wakes() == [await talk.only_queued("src")]
    assert await talk.tasks("hand") == []


async def test_a_source_that_a_person_canceled_stays_so(talk: Conversation) -> None:
    await talk.deploy(dag(source(kind="always_on")))
    await talk.cancel(await talk.only_queued("src"))
    assert await watch_sources(talk.ctx) == 0
    assert await talk.queued("src") == []


async def test_a_silent_source_is_restarted_as_the_same_task_with_backoff(talk: Conversation) -> None:
    await talk.deploy(dag(source(kind="always_on")))
    lease = await talk.lease("src")
    assert await talk.reap() == 1
    assert (await talk.claim(lease.task_id)).reason == "NotReady"
    await talk.pass_time(1000)
    assert (await talk.lease("src")).task_id == lease.task_id


async def entry(talk: Conversation) -> int:
    """One wake-up in the outbox."""
    await talk.deploy(dag(source(), reactive("work", "src")))
    await talk.trigger(0, 9)
    [row] = await talk.query("SELECT outbox_id FROM outbox")
    outbox_id: int = row["outbox_id"]
    return outbox_id


async def take(talk: Conversation, hold: float = 30) -> list[int]:
    taken = await talk.ctx.db.run(lambda tx: outbox.take_due(tx, 100, hold), lock=DeployLock.NONE)
    return [item.outbox_id for item in taken]


async def deliver_fails(talk: Conversation, outbox_id: int, tries: int = 3) -> int:
    return await talk.ctx.db.run(
        lambda tx: outbox.failed(tx, [outbox_id], "no route", backoff=Backoff(10, 25), max_tries=tries),
        lock=DeployLock.NONE,
    )


async def test_what_a_crashed_delivery_had_taken_comes_again(talk: Conversation) -> None:
    outbox_id = await entry(talk)
    assert await take(talk) == [outbox_id]
    assert await take(talk) == []
    await talk.pass_time(31)
    assert await take(talk) == [outbox_id]
    await talk.ctx.db.run(lambda tx: outbox.delivered(tx, [outbox_id]))
    await talk.pass_time(31)
    assert await take(talk) == []


async def test_failed_deliveries_back_off_until_they_are_given_up_visibly(talk: Conversation) -> None:
    outbox_id = await entry(talk)
    delays = []
    for given_up in (0, 0, 0, 1):
        assert await deliver_fails(talk, outbox_id, tries=4) == given_up
        [row] = await talk.query("SELECT available_at - tl_now() AS delay, tries FROM outbox")
        delays.append(row["delay"])
    bounds = [timedelta(seconds=seconds) for seconds in (10, 20, 25, 25)]
    for delay, bound in zip(delays, bounds, strict=True):
        assert bound - timedelta(seconds=5) < delay <= bound
    await talk.pass_time(1000)
    assert await take(talk) == []
    [failed] = await talk.ctx.db.run(lambda tx: outbox.list_failed(tx, 10))
    assert (failed["outbox_id"], failed["last_error"], failed["tries"]) == (outbox_id, "no route", 4)


async def test_what_was_given_up_can_be_replayed(talk: Conversation) -> None:
    outbox_id = await entry(talk)
    await deliver_fails(talk, outbox_id, tries=1)
    assert await talk.ctx.db.run(lambda tx: outbox.replay_failed(tx, [outbox_id + 1])) == 0
    assert await talk.ctx.db.run(lambda tx: outbox.replay_failed(tx, None)) == 1
    assert await take(talk) == [outbox_id]


async def test_the_lag_is_that_of_the_oldest_due_entry(talk: Conversation) -> None:
    await entry(talk)
    await talk.pass_time(100)
    lag = await talk.ctx.db.run(outbox.lag)
    assert lag.due == 1
    assert 100 <= lag.oldest_seconds < 130
    await take(talk)
    assert (await talk.ctx.db.run(outbox.lag)).due == 0


async def test_listeners_hear_of_wake_ups_after_their_commit_only(talk: Conversation) -> None:
    heard: list[object] = []
    talk.ctx.db.on_commit(lambda entries: heard.extend(item.task_id for item in entries))
    await talk.deploy(dag(source(), reactive("work", "src")))
    await talk.trigger(0, 9)
    assert heard == [await talk.only_queued("work")]
