"""How attempts end: retries, releases, late replies, and answers that a repeat gets again."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import CompleteResponse, EventIn, OutputIn
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import retry_task
from tracelake.dispatcher.steps.upkeep import begin_listening, reap_leases
from tracelake.domain.errors import Conflict, Forbidden, Invalid, NotFound


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


async def running(talk: Conversation, **fields: object) -> Lease:
    await talk.deploy(dag(source(), reactive("work", "src", **fields), reactive("next", "work")))
    await talk.trigger(0, 9)
    return await talk.lease("work")


async def source_lease(talk: Conversation, **fields: object) -> Lease:
    await talk.deploy(dag(source(kind="always_on", storage="postgres", **fields)))
    return await talk.lease("src")


async def test_a_failed_attempt_is_queued_again_with_backoff_and_a_wake_up_for_then(
    talk: Conversation,
) -> None:
    lease = await running(talk, retry={"base": 100, "max": 10_000}, max_attempts=10)
    await talk.forget_wakes()
    for failures in range(1, 4):
        answer = await talk.fail(lease)
        assert (answer.status, answer.task_status) == ("Failed", "Queued")
        row = await talk.task(lease.task_id)
        assert (row["failures"], row["error_message"]) == (failures, "it broke")
        assert answer.retry_at == row["ready_at"]
        ended = (await talk.attempts(lease.task_id))[-1]["ended_at"]
        delay = row["ready_at"] - ended
        nominal = timedelta(seconds=100 * 2 ** (failures - 1))
        assert nominal * 0.5 <= delay <= nominal * 1.5
        [wake] = await talk.all_wakes()
        assert (wake["task_id"], wake["available_at"], wake["due"]) == (lease.task_id, row["ready_at"], False)
        await talk.forget_wakes()
        await talk.pass_time(10_000)
        lease = await talk.lease(lease.task_id)


async def test_backoff_never_exceeds_the_jobs_maximum(talk: Conversation) -> None:
    lease = await running(talk, retry={"base": 100, "max": 150}, max_attempts=10)
    for _ in range(4):
        answer = await talk.fail(lease)
        ended = (await talk.attempts(lease.task_id))[-1]["ended_at"]
        assert answer.retry_at is not None
        assert answer.retry_at - ended <= timedelta(seconds=225)
        await talk.pass_time(1000)
        lease = await talk.lease(lease.task_id)


async def test_a_task_fails_for_good_after_max_attempts(talk: Conversation) -> None:
    lease = await running(talk, max_attempts=2)
    await talk.fail(lease)
    await talk.pass_time(10_000)
    lease = await talk.lease(lease.task_id)
    answer = await talk.fail(lease)
    assert (answer.task_status, answer.retry_at) == ("Failed", None)
    assert (await talk.claim(lease.task_id)).reason == "Failed"
    assert [row["outcome"] for row in await talk.attempts(lease.task_id)] == ["Failed", "Failed"]


async def test_what_is_not_retryable_fails_at_once(talk: Conversation) -> None:
    lease = await running(talk, max_attempts=5)
    assert (await talk.fail(lease, retryable=False)).task_status == "Failed"


async def test_a_release_uses_up_no_attempt_and_waits_for_nothing(talk: Conversation) -> None:
    lease = await running(talk, max_attempts=1)
    for attempt in range(1, 4):
        assert lease.attempt == attempt
        await talk.forget_wakes()
        answer = await talk.complete(lease, status="Released")
        assert answer.task_status == "Queued"
        assert await talk.due_wakes() == [lease.task_id]
        lease = await talk.lease(lease.task_id)
    assert (await talk.task(lease.task_id))["failures"] == 0
    assert (await talk.complete_scope(lease)).task_status == "Completed"


async def test_a_worker_may_end_its_own_task_as_canceled(talk: Conversation) -> None:
    lease = await running(talk)
    assert (await talk.complete(lease, status="Canceled")).task_status == "Canceled"
    assert await talk.tasks("next") == []


async def test_a_source_never_gives_up(talk: Conversation) -> None:
    lease = await source_lease(talk, max_attempts=1)
    for _ in range(5):
        assert (await talk.fail(lease)).task_status == "Queued"
        await talk.pass_time(10_000)
        lease = await talk.lease(lease.task_id)
    await talk.reap()
    assert await talk.status(lease.task_id) == "Queued"
    assert lease.attempt == 6


async def test_a_source_that_completes_is_started_again_with_its_failures_forgotten(
    talk: Conversation,
) -> None:
    lease = await source_lease(talk)
    await talk.fail(lease)
    await talk.pass_time(10_000)
    answer = await talk.complete(await talk.lease(lease.task_id))
    row = await talk.task(lease.task_id)
    assert (answer.task_status, row["failures"]) == ("Queued", 0)
    assert row["ready_at"] > row["now"]


async def test_a_source_that_says_it_cannot_go_on_stands_still_visibly(talk: Conversation) -> None:
    lease = await source_lease(talk)
    assert (await talk.fail(lease, retryable=False)).task_status == "Failed"
    assert (await talk.task(lease.task_id))["error_message"] == "it broke"
    await retry_task(talk.ctx, lease.task_id)
    assert (await talk.lease(lease.task_id)).attempt == 2


@pytest.mark.parametrize("status", ["Completed", "Failed", "Canceled", "Released"])
async def test_invariant_3_a_repeat_is_answered_like_the_first_and_changes_nothing(
    talk: Conversation, status: str
) -> None:
    lease = await running(talk)
    first = await talk.complete(lease, status=status)
    before = await talk.everything()
    for _ in range(2):
        assert await talk.complete(lease, status=status) == first
    assert await talk.everything() == before


@pytest.mark.parametrize("status", ["Failed", "Released"])
async def test_a_repeat_is_answered_the_same_after_a_newer_attempt_was_claimed_and_ended(
    talk: Conversation, status: str
) -> None:
    lease = await running(talk)
    first = await talk.complete(lease, status=status)
    await talk.pass_time(10_000)
    newer = await talk.lease(lease.task_id)
    before = await talk.everything()
    assert await talk.complete(lease, status=status) == first
    assert await talk.everything() == before
    await talk.complete_scope(newer)
    assert await talk.complete(lease, status=status) == first


async def test_a_repeat_with_other_words_is_stale(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.fail(lease)
    before = await talk.everything()
    with pytest.raises(Conflict) as refused:
        await talk.complete(lease, status="Failed", error_message="something else")
    assert refused.value.reason == "StaleLease"
    with pytest.raises(Conflict):
        await talk.complete_scope(lease)
    assert await talk.everything() == before


async def test_a_repeat_of_a_completion_whose_inputs_had_changed_is_told_so_again(talk: Conversation) -> None:
    await talk.deploy(
        dag(source(kind="always_on", storage="postgres"), reactive("up", "src", strategy="PerUpdate"))
    )
    head, uuid = await talk.lease("src"), await talk.dataset("src")
    await talk.emit(head, EventIn(dataset_uuid=uuid, cursor=9))
    lease = await talk.lease("up")
    await talk.emit(head, taken_back(uuid, 5, 9))
    for _ in range(2):
        with pytest.raises(Conflict) as refused:
            await talk.complete(lease)
        assert refused.value.reason == "InputChanged"
    assert len(await talk.attempts(lease.task_id)) == 1
    assert (await talk.task(lease.task_id))["failures"] == 0


async def test_invariant_1_a_stale_fence_changes_nothing_at_all(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.complete(lease, status="Released")
    current = await talk.lease(lease.task_id)
    forged = Lease(lease.task_id, current.attempt, uuid4(), lease.payload, "w1")
    old = Lease(lease.task_id, 1, current.token, lease.payload, "w1")
    before = await talk.everything()
    completed, failed = {"events": []}, {"status": "Failed"}
    for fence, reason in ((lease, "StaleAttempt"), (forged, "StaleLease"), (old, "StaleAttempt")):
        for fields in (completed, failed):
            with pytest.raises(Conflict) as refused:
                await talk.complete(fence, **fields)
            assert refused.value.reason == reason
        with pytest.raises(Conflict):
            await talk.emit(fence, EventIn(dataset_uuid=await talk.dataset("work"), start=0, end=9))
    with pytest.raises(NotFound):
        await talk.complete(Lease(uuid4(), 1, uuid4(), lease.payload, "w1"))
    assert await talk.everything() == before


async def test_a_late_reply_counts_while_the_retry_is_queued(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.reap()
    assert await talk.status(lease.task_id) == "Queued"
    assert (await talk.complete_scope(lease)).task_status == "Completed"
    assert [row["outcome"] for row in await talk.attempts(lease.task_id)] == ["Completed"]
    await talk.only_queued("next")
    assert (await talk.claim(lease.task_id)).reason == "Completed"


async def test_a_late_reply_counts_when_the_task_has_failed_for_good(talk: Conversation) -> None:
    lease = await running(talk, max_attempts=1)
    await talk.reap()
    assert await talk.status(lease.task_id) == "Failed"
    assert (await talk.complete_scope(lease)).task_status == "Completed"
    await talk.only_queued("next")


async def test_a_late_reply_takes_the_place_of_the_timeout(talk: Conversation) -> None:
    """One attempt, one failure at most: the timeout's is forgotten when the reply comes."""
    lease = await running(talk, max_attempts=2)
    await talk.reap()
    assert (await talk.task(lease.task_id))["failures"] == 1
    assert (await talk.fail(lease)).task_status == "Queued"
    assert (await talk.task(lease.task_id))["failures"] == 1
    await talk.pass_time(10_000)
    lease = await talk.lease(lease.task_id)
    await talk.reap()
    assert await talk.status(lease.task_id) == "Failed"
    assert (await talk.complete(lease, status="Released")).task_status == "Queued"
    assert (await talk.task(lease.task_id))["failures"] == 1


async def test_events_of_a_timed_out_attempt_count_until_a_newer_one_is_claimed(talk: Conversation) -> None:
    lease = await running(talk)
    uuid = await talk.dataset("work")
    await talk.reap()
    assert (await talk.emit(lease, EventIn(dataset_uuid=uuid, start=0, end=4))).events[0].state == "counted"
    await talk.pass_time(10_000)
    await talk.lease(lease.task_id)
    with pytest.raises(Conflict):
        await talk.emit(lease, EventIn(dataset_uuid=uuid, start=5, end=9))


async def test_the_reaper_waits_a_lease_after_it_began_to_listen(talk: Conversation) -> None:
    lease = await running(talk, heartbeat_timeout_seconds=100)
    await talk.pass_time(1000)
    since = await begin_listening(talk.ctx)
    assert await reap_leases(talk.ctx, since) == 0
    await talk.pass_time(99)
    assert await reap_leases(talk.ctx, since) == 0
    await talk.pass_time(2)
    assert await reap_leases(talk.ctx, since) == 1
    row = await talk.task(lease.task_id)
    assert (row["status"], row["last_outcome"]) == ("Queued", "TimedOut")
    assert "lease" in row["error_message"]


async def test_each_job_is_heard_for_its_own_lease(talk: Conversation) -> None:
    await talk.deploy(
        dag(
            source(),
            reactive("quick", "src", heartbeat_timeout_seconds=10),
            reactive("slow", "src", heartbeat_timeout_seconds=1000),
        )
    )
    await talk.trigger(0, 9)
    quick, slow = await talk.lease("quick"), await talk.lease("slow")
    assert await talk.reap(listened_for=20) == 1
    assert await talk.status(quick.task_id) == "Queued"
    assert await talk.status(slow.task_id) == "Running"


async def test_what_failed_or_was_canceled_is_retried_by_a_person_with_all_its_attempts(
    talk: Conversation,
) -> None:
    lease = await running(talk, max_attempts=1)
    await talk.fail(lease)
    await talk.forget_wakes()
    await retry_task(talk.ctx, lease.task_id)
    assert await talk.due_wakes() == [lease.task_id]
    assert (await talk.task(lease.task_id))["failures"] == 0
    again = await talk.lease(lease.task_id)
    with pytest.raises(Conflict):
        await retry_task(talk.ctx, lease.task_id)
    await talk.cancel(lease.task_id)
    await retry_task(talk.ctx, lease.task_id)
    with pytest.raises(Conflict) as refused:
        await talk.complete_scope(again)
    assert refused.value.reason == "StaleLease"
    await talk.complete_scope(await talk.lease(lease.task_id))
    with pytest.raises(Conflict):
        await retry_task(talk.ctx, lease.task_id)


async def test_a_persons_retry_brings_a_waiting_retry_forward(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.fail(lease)
    assert (await talk.claim(lease.task_id)).reason == "NotReady"
    await retry_task(talk.ctx, lease.task_id)
    assert (await talk.claim(lease.task_id)).status == "Claimed"


async def test_an_update_that_another_one_covers_is_not_retried(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate", max_attempts=1)))
    await talk.trigger(cursor=1)
    never_claimed = await talk.only_queued("up")
    await talk.cancel(never_claimed)
    await talk.trigger(cursor=2)
    with pytest.raises(Conflict) as refused:
        await retry_task(talk.ctx, never_claimed)
    assert refused.value.reason == "Superseded"
    one = await talk.lease("up")
    await talk.trigger(cursor=3)
    await talk.fail(one)
    two = await talk.lease("up")
    await talk.fail(two)
    await retry_task(talk.ctx, one.task_id)
    for covered in (two.task_id, never_claimed):
        with pytest.raises(Conflict):
            await retry_task(talk.ctx, covered)
    assert (await talk.lease(one.task_id)).read.upto == 3


async def test_a_canceled_update_may_wait_again_behind_the_one_that_runs(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate")))
    await talk.trigger(cursor=1)
    lease = await talk.lease("up")
    await talk.trigger(cursor=2)
    waiting = await talk.only_queued("up")
    await talk.cancel(waiting)
    await retry_task(talk.ctx, waiting)
    assert (await talk.claim(waiting)).reason == "NotReady"
    await talk.complete(lease)
    assert (await talk.lease(waiting)).read.after == 1


async def test_several_completions_of_one_call_are_each_decided_on_their_own(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("work", "src"), reactive("next", "work")))
    leases = []
    for n in range(5):
        await talk.trigger(n * 10, n * 10 + 9)
        leases.append(await talk.lease("work"))
    done, stale, foreign, unknown, failed = leases
    await talk.complete(stale, status="Released")
    answers = await complete_tasks(
        talk.ctx,
        [
            done.completion(OutputIn(0, start=0, end=9)),
            stale.completion(OutputIn(0, start=10, end=19)),
            foreign.completion(OutputIn(0, dataset_uuid=uuid4(), start=20, end=29)),
            unknown.completion(OutputIn(7, start=30, end=39)),
            failed.completion(status="Failed"),
        ],
    )
    assert isinstance(answers[0], CompleteResponse)
    assert isinstance(answers[1], Conflict)
    assert isinstance(answers[2], Forbidden)
    assert isinstance(answers[3], Invalid)
    assert isinstance(answers[4], CompleteResponse)
    statuses = [await talk.status(lease.task_id) for lease in leases]
    assert statuses == ["Completed", "Queued", "Running", "Running", "Queued"]


async def test_what_is_not_completed_has_neither_outputs_nor_events(talk: Conversation) -> None:
    lease = await running(talk)
    uuid: UUID = await talk.dataset("work")
    before = await talk.everything()
    with pytest.raises(Invalid):
        await talk.complete(lease, OutputIn(0, start=0, end=9), status="Failed")
    with pytest.raises(Invalid):
        await talk.complete(lease, status="Released", events=[EventIn(uuid, start=0, end=9)])
    assert await talk.everything() == before


async def test_the_same_completion_twice_in_one_call_is_answered_twice_and_counts_once(
    talk: Conversation, ctx: StepContext
) -> None:
    lease = await running(talk)
    failed, released = lease.completion(status="Failed"), lease.completion(status="Released")
    first, second, third = await complete_tasks(ctx, [failed, failed, released])
    assert isinstance(first, CompleteResponse)
    assert first == second
    assert isinstance(third, Conflict)
    assert (await talk.task(lease.task_id))["failures"] == 1


async def test_a_no_op_that_only_says_completed_has_done_its_scope(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.complete(lease)
    assert await talk.scopes("work") == [(0, 9)]
    assert len(await talk.queued("next")) == 1


async def test_a_canceled_attempt_is_closed_in_the_history(talk: Conversation) -> None:
    lease = await running(talk)
    await talk.cancel(lease.task_id)
    [attempt] = await talk.attempts(lease.task_id)
    assert (attempt["outcome"], attempt["ended_at"] is not None) == ("Canceled", True)
    assert (await talk.beat(lease)).cancel
