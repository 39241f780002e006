"""Claims, heartbeats, fetches and cancels: who holds a task, and what they are told."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from tests.support.conversation import Conversation, dag, lease_of, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import (
    ClaimRequest,
    CompleteRequest,
    CompletionStatus,
    HeartbeatRequest,
)
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import pause_job, resume_job, retry_task
from tracelake.dispatcher.steps.running_attempt import fetch_task, heartbeat
from tracelake.domain.errors import BadRequest, Conflict, NotFound
from tracelake.tokens import capability


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


def unfenced(task: UUID, status: CompletionStatus) -> CompleteRequest:
    return CompleteRequest(task, status)


async def queued(talk: Conversation, **fields: object) -> UUID:
    await talk.deploy(dag(source(), reactive("work", "src", **fields)))
    await talk.trigger(0, 9)
    return await talk.only_queued("work")


async def test_a_trigger_runs_through_to_the_downstream_task(talk: Conversation) -> None:
    deployed = await talk.deploy(dag(source(), reactive("first", "src"), reactive("second", "first")))
    assert deployed.created
    assert (await talk.trigger(0, 99)).tasks_created == 1
    lease = await talk.lease("first")
    assert lease.read.partition_key == "0-99"
    assert (await talk.complete_scope(lease)).task_status == "Completed"
    assert (await talk.lease("second")).read.partition_key == "0-99"


async def test_a_claim_hands_out_a_lease_a_token_and_the_payload(talk: Conversation) -> None:
    task = await queued(talk, config={"size": 3}, timeout_seconds=50, heartbeat_timeout_seconds=40)
    answer = await talk.claim(task, "w1")
    assert (answer.status, answer.attempt, answer.reason) == ("Claimed", 1, None)
    row = await talk.task(task)
    assert answer.lease_token == row["lease_token"]
    assert answer.lease_expires_at == row["lease_expires_at"]
    [attempt] = await talk.attempts(task)
    assert row["lease_expires_at"] - attempt["claimed_at"] == timedelta(seconds=40)
    payload = answer.task
    assert payload is not None
    assert (payload.job.dag_name, payload.job.name, payload.config) == ("chain", "work", {"size": 3})
    assert (payload.timeout_seconds, payload.heartbeat_timeout_seconds) == (50, 40)
    assert payload.epoch == attempt["epoch"]
    assert answer.capability_token is not None


async def test_epochs_rise_with_every_claim_of_any_task(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    epochs = []
    for n in range(3):
        await talk.trigger(n, n)
        lease = await talk.lease("work")
        epochs.append(lease.payload.epoch)
        await talk.complete(lease, status="Released")
        epochs.append((await talk.lease("work")).payload.epoch)
    assert epochs == sorted(set(epochs))


async def test_a_parquet_output_gets_a_staging_place_of_the_attempts_own(talk: Conversation) -> None:
    task = await queued(talk, storage="parquet")
    places = []
    for _ in range(2):
        lease = await talk.lease(task)
        [output] = lease.payload.outputs
        assert output.staging is not None
        assert f"{task}/{lease.attempt}-{lease.payload.epoch}/" in output.staging
        places.append(output.staging)
        await talk.complete(lease, status="Released")
    assert places[0] != places[1]


async def test_a_running_task_is_not_claimed_again(talk: Conversation) -> None:
    task = await queued(talk)
    await talk.lease(task, "w1")
    assert (await talk.claim(task, "w2")).reason == "AlreadyRunning"
    assert (await talk.claim(task, "w1")).reason == "AlreadyRunning"


async def test_an_ended_task_is_not_claimed_again_and_says_how_it_ended(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src")))
    for n in range(3):
        await talk.trigger(n, n)
    done, failed, canceled = await talk.queued("work")
    await talk.complete_scope(await talk.lease(done))
    await talk.fail(await talk.lease(failed), retryable=False)
    await talk.cancel(canceled)
    reasons = [(await talk.claim(task)).reason for task in (done, failed, canceled, uuid4())]
    assert reasons == ["Completed", "Failed", "Canceled", "NotFound"]


async def test_a_task_is_not_ready_before_its_retry_time(talk: Conversation) -> None:
    task = await queued(talk, retry={"base": 100, "max": 100})
    await talk.fail(await talk.lease(task))
    assert (await talk.claim(task)).reason == "NotReady"
    await talk.pass_time(49)
    assert (await talk.claim(task)).reason == "NotReady"
    await talk.pass_time(102)
    assert (await talk.claim(task)).status == "Claimed"


async def test_a_task_is_not_ready_while_its_job_is_paused(talk: Conversation) -> None:
    task = await queued(talk)
    await pause_job(talk.ctx, "chain", "work")
    assert (await talk.claim(task)).reason == "NotReady"
    await resume_job(talk.ctx, "chain", "work")
    assert (await talk.claim(task)).status == "Claimed"


async def test_a_task_is_not_ready_while_its_jobs_cap_is_full(talk: Conversation) -> None:
    task = await queued(talk, scaling={"max_concurrency": 1})
    await talk.trigger(10, 19)
    other = (await talk.queued("work"))[1]
    lease = await talk.lease(task)
    assert (await talk.claim(other)).reason == "NotReady"
    await talk.complete_scope(lease)
    assert (await talk.claim(other)).status == "Claimed"


async def test_an_update_is_not_ready_while_an_earlier_one_lives(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate")))
    await talk.trigger(cursor=1)
    lease = await talk.lease("up")
    await talk.trigger(cursor=2)
    waiting = await talk.only_queued("up")
    assert (await talk.claim(waiting)).reason == "NotReady"
    await talk.fail(lease)
    assert (await talk.claim(waiting)).reason == "NotReady", "the retry comes first"
    await talk.cancel(lease.task_id)
    assert (await talk.claim(waiting)).status == "Claimed"


async def test_a_claim_key_repeats_the_lease_for_its_own_worker_only(talk: Conversation) -> None:
    task = await queued(talk)
    first = await talk.claim(task, "w1", "key")
    again = await talk.claim(task, "w1", "key")
    assert (again.lease_token, again.attempt, again.task) == (first.lease_token, 1, first.task)
    assert (await talk.claim(task, "w2", "key")).reason == "AlreadyRunning"
    assert (await talk.claim(task, "w1", "other")).reason == "AlreadyRunning"
    assert (await talk.claim(task, "w1")).reason == "AlreadyRunning"
    await talk.complete_scope(lease_of(again))
    assert (await talk.claim(task, "w1", "key")).reason == "Completed"


async def test_an_old_claim_key_gets_nothing_of_a_newer_attempt(talk: Conversation) -> None:
    task = await queued(talk)
    await talk.complete(await talk.lease(task, "w1", "key"), status="Released")
    await talk.lease(task, "w2", "key")
    assert (await talk.claim(task, "w1", "key")).reason == "AlreadyRunning"


async def test_one_call_with_the_same_claim_twice_gets_the_same_lease_only_with_a_key(
    talk: Conversation,
) -> None:
    task = await queued(talk)
    await talk.trigger(10, 19)
    other = (await talk.queued("work"))[1]
    keyed, plain = ClaimRequest(task, "w1", "k"), ClaimRequest(other, "w1")
    answers = await claim_tasks(talk.ctx, [keyed, keyed, plain, plain])
    assert answers[0].lease_token == answers[1].lease_token
    assert [a.reason for a in answers] == [None, None, None, "AlreadyRunning"]


async def test_attempt_counts_claims_and_nothing_else(talk: Conversation) -> None:
    task = await queued(talk, max_attempts=2)
    assert (await talk.task(task))["attempt"] == 0
    lease = await talk.lease(task)
    await talk.fail(lease)
    assert (await talk.task(task))["attempt"] == 1
    await talk.pass_time(10_000)
    await talk.lease(task)
    await talk.reap()
    assert (await talk.task(task))["attempt"] == 2
    await retry_task(talk.ctx, task)
    assert (await talk.task(task))["attempt"] == 2
    assert [row["attempt"] for row in await talk.attempts(task)] == [1, 2]


async def test_a_waiting_task_of_a_scope_that_was_taken_back_waits_for_it(talk: Conversation) -> None:
    """And when the scope is committed again, the task for its new revision is the one that runs."""
    await talk.deploy(
        dag(source(), reactive("made", "src"), reactive("read", "made"), reactive("end", "read"))
    )
    await talk.trigger(0, 9)
    await talk.run("made")
    old = await talk.only_queued("read")
    await talk.trigger(10, 19)
    speaker = await talk.lease("made")
    await talk.emit(speaker, taken_back(await talk.dataset("made"), 0, 9))
    assert (await talk.claim(old)).reason == "NotReady"
    await talk.run("made")
    assert (await talk.claim(old)).reason == "Canceled"
    await talk.run("read")
    await talk.only_queued("end")


async def test_a_heartbeat_extends_the_lease(talk: Conversation) -> None:
    lease = await talk.lease(await queued(talk, heartbeat_timeout_seconds=100))
    before = (await talk.task(lease.task_id))["lease_expires_at"]
    await talk.pass_time(60)
    answer = await talk.beat(lease)
    assert answer.lease_expires_at is not None
    assert answer.lease_expires_at >= before + timedelta(seconds=60)
    assert (answer.cancel, answer.pause, answer.capability_token) == (False, False, None)
    assert (await talk.task(lease.task_id))["lease_expires_at"] == answer.lease_expires_at


async def test_a_heartbeat_keeps_an_attempt_from_being_reaped(talk: Conversation) -> None:
    lease = await talk.lease(await queued(talk, heartbeat_timeout_seconds=100))
    assert await talk.reap(listened_for=99) == 0
    await talk.beat(lease)
    assert await talk.reap(listened_for=99) == 0
    assert await talk.reap(listened_for=101) == 1


async def test_a_heartbeat_brings_a_fresh_token_when_the_old_one_nears_its_end(talk: Conversation) -> None:
    lease = await talk.lease(await queued(talk, timeout_seconds=1000, heartbeat_timeout_seconds=600))
    await talk.pass_time(capability.lifetime_seconds(1000) - 10)
    assert (await talk.beat(lease)).capability_token is not None


async def test_a_heartbeat_tells_a_paused_job_to_pause(talk: Conversation) -> None:
    await talk.deploy(dag(source(kind="always_on")))
    lease = await talk.lease("src")
    await pause_job(talk.ctx, "chain", "src")
    assert (await talk.beat(lease)).pause
    await resume_job(talk.ctx, "chain", "src")
    assert not (await talk.beat(lease)).pause


async def test_a_heartbeat_of_a_canceled_attempt_says_cancel_and_extends_nothing(talk: Conversation) -> None:
    lease = await talk.lease(await queued(talk))
    await talk.cancel(lease.task_id)
    before = await talk.everything()
    assert (await talk.beat(lease)).cancel
    assert await talk.everything() == before


@pytest.mark.parametrize("status", ["Completed", "Failed", "Released", "Canceled"])
async def test_a_heartbeat_after_the_end_is_refused_and_changes_nothing(
    talk: Conversation, status: str
) -> None:
    lease = await talk.lease(await queued(talk))
    await talk.complete(lease, status=status)
    before = await talk.everything()
    with pytest.raises(Conflict) as refused:
        await talk.beat(lease)
    assert refused.value.reason == "StaleLease"
    assert await talk.everything() == before


async def test_invariant_1_a_heartbeat_with_a_stale_fence_extends_nothing(talk: Conversation) -> None:
    lease = await talk.lease(await queued(talk))
    stale = [
        (HeartbeatRequest(lease.task_id, lease.attempt, uuid4()), "StaleLease"),
        (HeartbeatRequest(lease.task_id, lease.attempt + 1, lease.token), "StaleAttempt"),
    ]
    before = await talk.everything()
    for request, reason in stale:
        with pytest.raises(Conflict) as refused:
            await heartbeat(talk.ctx, request)
        assert refused.value.reason == reason
    with pytest.raises(NotFound):
        await heartbeat(talk.ctx, HeartbeatRequest(uuid4(), 1, lease.token))
    assert await talk.everything() == before


async def test_a_fetch_shows_the_frozen_payload_and_changes_nothing(talk: Conversation) -> None:
    task = await queued(talk)
    before = await talk.everything()
    unclaimed = await fetch_task(talk.ctx, task)
    assert (unclaimed.status, unclaimed.attempt) == ("Queued", 0)
    assert unclaimed.task.inputs[0].partition_key == "0-9"
    assert unclaimed.task.outputs[0].staging is None
    assert await talk.everything() == before
    lease = await talk.lease(task)
    fetched = await fetch_task(talk.ctx, task)
    assert (fetched.status, fetched.attempt, fetched.task) == ("Running", 1, lease.payload)
    with pytest.raises(NotFound):
        await fetch_task(talk.ctx, uuid4())


async def test_a_fetched_update_keeps_the_range_of_its_claim(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate")))
    await talk.trigger(cursor=5)
    waiting = await talk.only_queued("up")
    await talk.trigger(cursor=6)
    assert (await fetch_task(talk.ctx, waiting)).task.inputs[0].upto == 6
    await talk.lease(waiting)
    await talk.trigger(cursor=9)
    assert (await fetch_task(talk.ctx, waiting)).task.inputs[0].upto == 6


async def test_a_canceled_task_is_fetched_as_such_and_its_cancel_needs_no_lease(talk: Conversation) -> None:
    task = await queued(talk)
    await talk.cancel(task)
    assert (await fetch_task(talk.ctx, task)).status == "Canceled"
    before = await talk.everything()
    answer = await talk.say(unfenced(task, "Canceled"))
    assert (answer.status, answer.task_status) == ("Canceled", "Canceled")
    assert await talk.everything() == before


async def test_without_a_lease_nothing_else_is_completed(talk: Conversation) -> None:
    lease = await talk.lease(await queued(talk))
    before = await talk.everything()
    for status in ("Completed", "Failed", "Released", "Canceled"):
        with pytest.raises(BadRequest) as refused:
            await talk.say(unfenced(lease.task_id, status))
        assert refused.value.reason == "FenceMissing"
    assert await talk.everything() == before


async def test_canceling_twice_is_canceling_once_and_the_ended_stay_as_they_are(talk: Conversation) -> None:
    task = await queued(talk)
    await talk.cancel(task)
    before = await talk.everything()
    await talk.cancel(task)
    assert await talk.everything() == before
    await talk.trigger(10, 19)
    lease = await talk.run("work")
    with pytest.raises(Conflict):
        await talk.cancel(lease.task_id)
    with pytest.raises(NotFound):
        await talk.cancel(uuid4())


async def test_a_canceled_attempt_completes_nothing_but_its_cancel(talk: Conversation) -> None:
    lease = await talk.lease(await queued(talk))
    await talk.cancel(lease.task_id)
    before = await talk.everything()
    for status in ("Completed", "Failed", "Released"):
        with pytest.raises(Conflict) as refused:
            await talk.complete(lease, status=status)
        assert refused.value.reason == "Canceled"
    assert (await talk.complete(lease, status="Canceled")).task_status == "Canceled"
    assert await talk.everything() == before
