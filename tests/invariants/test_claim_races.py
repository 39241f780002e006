"""Claims at once, and claims against whatever frees or closes their job: each order, none left to luck."""

from __future__ import annotations

from uuid import UUID

import asyncpg
import pytest

from tests.support.conversation import Conversation, dag, reactive, source
from tests.support.interleave import COMMIT, Interleaver
from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse, EventIn
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import pause_job, resume_job
from tracelake.store import tasks


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest.fixture
def both(talk: Conversation, pool: asyncpg.Pool) -> Interleaver:
    return Interleaver(talk, pool)


async def queued(talk: Conversation, count: int, **fields: object) -> list[UUID]:
    await talk.deploy(dag(source(), reactive("work", "src", **fields)))
    for n in range(count):
        await talk.trigger(n * 10, n * 10 + 9)
    return await talk.queued("work")


async def test_invariant_1_two_claims_at_once_give_one_lease(talk: Conversation, both: Interleaver) -> None:
    [task] = await queued(talk, 1)
    seen = await both.run(lambda c: c.claim(task, "w1"), lambda c: c.claim(task, "w2"))
    assert seen.second_waited
    assert isinstance(seen.first, ClaimResponse)
    assert isinstance(seen.second, ClaimResponse)
    assert (seen.first.status, seen.second.reason) == ("Claimed", "AlreadyRunning")
    assert [row["worker_id"] for row in await talk.attempts(task)] == ["w1"]


async def test_invariant_3_the_same_claim_key_twice_at_once_gives_the_same_lease(
    talk: Conversation, both: Interleaver
) -> None:
    [task] = await queued(talk, 1)
    seen = await both.run(lambda c: c.claim(task, "w1", "k"), lambda c: c.claim(task, "w1", "k"))
    assert isinstance(seen.first, ClaimResponse)
    assert isinstance(seen.second, ClaimResponse)
    assert seen.first.status == seen.second.status == "Claimed"
    assert (seen.first.attempt, seen.first.lease_token) == (seen.second.attempt, seen.second.lease_token)
    assert seen.first.lease_expires_at == seen.second.lease_expires_at
    assert seen.first.task == seen.second.task
    assert len(await talk.attempts(task)) == 1


@pytest.mark.parametrize("hold", [COMMIT, tasks.SQL.lock_gates, tasks.SQL.read_gates])
async def test_two_claims_for_the_last_slot_never_exceed_the_cap(
    talk: Conversation, both: Interleaver, hold: str
) -> None:
    one, two, three = await queued(talk, 3, scaling={"max_concurrency": 2})
    await talk.lease(one)
    seen = await both.run(lambda c: c.claim(two, "w1"), lambda c: c.claim(three, "w2"), hold=hold)
    assert isinstance(seen.first, ClaimResponse)
    assert isinstance(seen.second, ClaimResponse)
    assert sorted([seen.first.status, seen.second.status]) == ["Claimed", "NotClaimed"]
    assert len(await talk.tasks("work", "Running")) == 2


async def test_claims_of_one_call_share_the_last_slot(talk: Conversation) -> None:
    ids = await queued(talk, 3, scaling={"max_concurrency": 2})
    answers = await claim_tasks(talk.ctx, [ClaimRequest(task, "w1") for task in ids])
    assert [a.status for a in answers] == ["Claimed", "Claimed", "NotClaimed"]
    assert answers[2].reason == "NotReady"


@pytest.mark.parametrize("hold", [COMMIT, tasks.SQL.lock_gates, tasks.SQL.lock_tasks])
@pytest.mark.parametrize("claim_first", [True, False])
async def test_a_slot_that_comes_free_reaches_the_task_that_found_the_job_full(
    talk: Conversation, both: Interleaver, claim_first: bool, hold: str
) -> None:
    """Whichever comes first: the claim gets the slot, or the end of the other one wakes it."""
    one, two = await queued(talk, 2, scaling={"max_concurrency": 1})
    running = await talk.lease(one)
    await talk.forget_wakes()

    async def claim(c: Conversation) -> ClaimResponse:
        return await c.claim(two, "w2")

    async def end(c: Conversation) -> object:
        return await c.complete(running)

    if claim_first:
        answer = (await both.run(claim, end, hold=hold)).first
    else:
        answer = (await both.run(end, claim, hold=hold)).second
    assert isinstance(answer, ClaimResponse)
    assert answer.status == "Claimed" or two in await talk.due_wakes()
    assert await talk.status(one) == "Completed"


async def test_each_slot_wakes_another_of_those_that_found_the_job_full(talk: Conversation) -> None:
    ids = await queued(talk, 5, scaling={"max_concurrency": 2})
    running = [await talk.lease(task) for task in ids[:2]]
    for task in ids[2:]:
        assert (await talk.claim(task)).reason == "NotReady"
    await talk.forget_wakes()
    await talk.complete_scope(running[0])
    await talk.fail(running[1], retryable=False)
    assert await talk.due_wakes() == ids[2:4]


async def test_every_task_of_a_burst_beyond_the_cap_is_woken_in_its_turn(talk: Conversation) -> None:
    """By slots that come free alone: no sweep runs here."""
    always_on = source(kind="always_on")
    await talk.deploy(dag(always_on, reactive("work", "src", scaling={"max_concurrency": 2})))
    head, uuid = await talk.lease("src"), await talk.dataset("src")
    await talk.forget_wakes()
    await talk.emit(head, *(EventIn(uuid, start=n, end=n) for n in range(9)))
    while woken := await talk.due_wakes():
        await talk.forget_wakes()
        leases = [await talk.lease(task) for task in woken if await talk.status(task) == "Queued"]
        for lease in leases:
            await talk.complete_scope(lease)
    assert await talk.queued("work") == []


async def test_a_slot_is_handed_on_by_a_task_that_was_canceled_while_it_waited(talk: Conversation) -> None:
    one, two, three = await queued(talk, 3, scaling={"max_concurrency": 1})
    running = await talk.lease(one)
    assert (await talk.claim(two)).reason == "NotReady"
    assert (await talk.claim(three)).reason == "NotReady"
    await talk.forget_wakes()
    await talk.complete_scope(running)
    assert await talk.due_wakes() == [two]
    await talk.cancel(two)
    assert three in await talk.due_wakes()


async def test_a_reaped_and_a_canceled_attempt_free_their_slot(talk: Conversation) -> None:
    one, two, three = await queued(talk, 3, scaling={"max_concurrency": 1}, max_attempts=1)
    lease = await talk.lease(one)
    for task in (two, three):
        await talk.claim(task)
    await talk.forget_wakes()
    await talk.cancel(lease.task_id)
    assert await talk.due_wakes() == [two]
    await talk.lease(two)
    await talk.reap()
    assert await talk.due_wakes() == [two, three]


@pytest.mark.parametrize("claim_first", [True, False])
@pytest.mark.parametrize("hold", [COMMIT, tasks.SQL.lock_gates])
async def test_a_claim_against_a_resume_is_granted_or_woken(
    talk: Conversation, both: Interleaver, claim_first: bool, hold: str, caplog: pytest.LogCaptureFixture
) -> None:
    [task] = await queued(talk, 1, scaling={"max_concurrency": 1})
    await pause_job(talk.ctx, "chain", "work")
    await talk.forget_wakes()

    async def resume(c: Conversation) -> None:
        await resume_job(c.ctx, "chain", "work")

    if claim_first:
        answer = (await both.run(lambda c: c.claim(task), resume, hold=hold)).first
    else:
        answer = (await both.run(resume, lambda c: c.claim(task), hold=hold)).second
    assert isinstance(answer, ClaimResponse)
    assert answer.status == "Claimed" or await talk.due_wakes() == [task]
    assert "rolled back" not in caplog.text, "tasks are locked before their job, everywhere"


@pytest.mark.parametrize("event_first", [True, False])
@pytest.mark.parametrize("hold", [COMMIT, tasks.SQL.lock_gates])
async def test_invariant_2_an_event_against_the_claim_of_the_waiting_update_loses_nothing(
    talk: Conversation, both: Interleaver, event_first: bool, hold: str
) -> None:
    await talk.deploy(
        dag(source(kind="always_on", storage="postgres"), reactive("up", "src", strategy="PerUpdate"))
    )
    head = await talk.lease("src")
    uuid = await talk.dataset("src")
    await talk.emit(head, EventIn(dataset_uuid=uuid, cursor=5))
    waiting = await talk.only_queued("up")

    async def event(c: Conversation) -> object:
        return await c.emit(head, EventIn(dataset_uuid=uuid, cursor=9))

    async def claim(c: Conversation) -> ClaimResponse:
        return await c.claim(waiting)

    if event_first:
        answer = (await both.run(event, claim, hold=hold)).second
    else:
        answer = (await both.run(claim, event, hold=hold)).first
    assert isinstance(answer, ClaimResponse)
    assert answer.task is not None
    read = answer.task.inputs[0]
    assert read.after == -1
    if read.upto == 5:
        await talk.only_queued("up")
    else:
        assert read.upto == 9


async def test_invariant_8_a_slot_that_comes_free_wakes_a_task_whose_row_somebody_holds(
    talk: Conversation, ctx: StepContext
) -> None:
    """A heartbeat of an attempt that is over, or a resume of a job that isn't paused, holds the row of a task that
    waits for a slot, and won't claim it: the task must hear of the slot all the same."""
    first, second = await queued(talk, 2, scaling={"max_concurrency": 1})
    lease = await talk.lease(first)
    assert (await talk.claim(second)).reason == "NotReady"
    await talk.forget_wakes()
    async with ctx.db.transaction() as holder:
        await tasks.lock(holder, [second])
        await talk.complete(lease)
    assert second in await talk.due_wakes()
