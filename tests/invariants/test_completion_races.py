"""A completion against everything that may end or replace its attempt at the same moment."""

from __future__ import annotations

from uuid import UUID

import asyncpg
import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source
from tests.support.interleave import Interleaver
from tracelake.contracts.dispatcher_api import (
    ClaimResponse,
    CompleteResponse,
    EventIn,
    EventsResponse,
    HeartbeatResponse,
    OutputIn,
)
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import retry_task
from tracelake.dispatcher.steps.upkeep import begin_listening, reap_leases
from tracelake.domain.errors import Conflict, Invalid


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest.fixture
def both(talk: Conversation, pool: asyncpg.Pool) -> Interleaver:
    return Interleaver(talk, pool)


async def running(talk: Conversation, **fields: object) -> Lease:
    """A claimed task of ``work``, with ``next`` waiting for what it makes."""
    await talk.deploy(dag(source(), reactive("work", "src", **fields), reactive("next", "work")))
    await talk.trigger(0, 9)
    return await talk.lease("work")


async def expired(talk: Conversation, **fields: object) -> tuple[Lease, object]:
    """A claimed task whose lease has run out, and since when somebody listens."""
    lease = await running(talk, **fields)
    since = await begin_listening(talk.ctx)
    await talk.pass_time(10_000)
    return lease, since


async def test_invariant_3_the_same_completion_twice_at_once_commits_once(
    talk: Conversation, both: Interleaver
) -> None:
    lease = await running(talk)
    seen = await both.run(lambda c: c.complete_scope(lease), lambda c: c.complete_scope(lease))
    assert seen.second_waited
    assert isinstance(seen.first, CompleteResponse)
    assert seen.first == seen.second
    await talk.only_queued("next")
    assert [e["state"] for e in await talk.events() if e["task_id"]] == ["counted"]


async def test_invariant_1_two_different_completions_at_once_end_the_attempt_once(
    talk: Conversation, both: Interleaver
) -> None:
    lease = await running(talk)
    seen = await both.run(lambda c: c.fail(lease), lambda c: c.complete_scope(lease))
    assert isinstance(seen.second, Conflict)
    assert seen.second.reason == "StaleLease"
    assert await talk.tasks("next") == []


async def test_a_completion_before_the_reaper_stands(talk: Conversation, both: Interleaver) -> None:
    lease, since = await expired(talk)
    seen = await both.run(lambda c: c.complete_scope(lease), lambda c: reap_leases(c.ctx, since))
    assert seen.second_waited
    assert seen.second == 0
    assert await talk.status(lease.task_id) == "Completed"
    assert [row["outcome"] for row in await talk.attempts(lease.task_id)] == ["Completed"]


async def test_a_completion_just_after_the_reaper_still_counts(talk: Conversation, both: Interleaver) -> None:
    lease, since = await expired(talk)
    seen = await both.run(lambda c: reap_leases(c.ctx, since), lambda c: c.complete_scope(lease))
    assert seen.second_waited
    assert (seen.first, isinstance(seen.second, CompleteResponse)) == (1, True)
    assert await talk.status(lease.task_id) == "Completed"
    await talk.only_queued("next")


async def test_a_heartbeat_before_the_reaper_keeps_the_attempt(talk: Conversation, both: Interleaver) -> None:
    lease, since = await expired(talk)
    seen = await both.run(lambda c: c.beat(lease), lambda c: reap_leases(c.ctx, since))
    assert isinstance(seen.first, HeartbeatResponse)
    assert seen.second == 0
    assert await talk.status(lease.task_id) == "Running"


async def test_a_heartbeat_just_after_the_reaper_is_told_that_it_is_over(
    talk: Conversation, both: Interleaver
) -> None:
    lease, since = await expired(talk)
    seen = await both.run(lambda c: reap_leases(c.ctx, since), lambda c: c.beat(lease))
    assert isinstance(seen.second, Conflict)
    assert await talk.status(lease.task_id) == "Queued"


async def test_two_reapers_at_once_give_an_attempt_up_once(talk: Conversation, both: Interleaver) -> None:
    lease, since = await expired(talk)
    seen = await both.run(lambda c: reap_leases(c.ctx, since), lambda c: reap_leases(c.ctx, since))
    assert (seen.first, seen.second) == (1, 0)
    assert (await talk.task(lease.task_id))["failures"] == 1


async def test_a_cancel_before_the_completion_refuses_it(talk: Conversation, both: Interleaver) -> None:
    lease = await running(talk)
    seen = await both.run(lambda c: c.cancel(lease.task_id), lambda c: c.complete_scope(lease))
    assert seen.second_waited
    assert isinstance(seen.second, Conflict)
    assert seen.second.reason == "Canceled"
    assert await talk.scopes("work") == []
    assert await talk.tasks("next") == []


async def test_a_completion_before_the_cancel_stands(talk: Conversation, both: Interleaver) -> None:
    lease = await running(talk)
    seen = await both.run(lambda c: c.complete_scope(lease), lambda c: c.cancel(lease.task_id))
    assert seen.second_waited
    assert isinstance(seen.second, Conflict)
    assert seen.second.reason == "AlreadyEnded"
    await talk.only_queued("next")


async def timed_out(talk: Conversation, **fields: object) -> Lease:
    """An attempt that was given up, its retry queued and ready."""
    lease = await running(talk, **fields)
    await talk.reap()
    await talk.pass_time(10_000)
    return lease


async def test_a_late_reply_before_the_claim_of_the_retry_counts(
    talk: Conversation, both: Interleaver
) -> None:
    late = await timed_out(talk)
    seen = await both.run(lambda c: c.complete_scope(late), lambda c: c.claim(late.task_id, "w2"))
    assert seen.second_waited
    assert isinstance(seen.second, ClaimResponse)
    assert seen.second.reason == "Completed"
    await talk.only_queued("next")


async def test_invariant_1_a_late_reply_after_the_claim_of_the_retry_changes_nothing(
    talk: Conversation, both: Interleaver
) -> None:
    late = await timed_out(talk)
    seen = await both.run(lambda c: c.claim(late.task_id, "w2"), lambda c: c.complete_scope(late))
    assert seen.second_waited
    assert isinstance(seen.second, Conflict)
    assert seen.second.reason == "StaleAttempt"
    assert await talk.scopes("work") == []
    before = await talk.everything()
    for status in ("Completed", "Failed", "Released"):
        with pytest.raises(Conflict, match="not the current one"):
            await talk.complete(late, status=status)
    assert await talk.everything() == before


async def test_a_late_reply_counts_after_a_persons_retry_until_that_is_claimed(talk: Conversation) -> None:
    late = await timed_out(talk, max_attempts=1)
    await retry_task(talk.ctx, late.task_id, "tester")
    assert (await talk.complete_scope(late)).task_status == "Completed"


@pytest.mark.parametrize("status", ["Completed", "Released", "Failed"])
async def test_a_late_reply_of_an_update_is_stale_once_a_later_task_has_its_range(
    talk: Conversation, status: str
) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate", max_attempts=1)))
    await talk.trigger(cursor=5)
    late = await talk.lease("up")
    await talk.trigger(cursor=6)
    await talk.reap()
    later = await talk.lease("up")
    assert later.read.upto == 6
    before = await talk.everything()
    with pytest.raises(Conflict) as refused:
        await talk.complete(late, status=status)
    assert refused.value.reason == "StaleAttempt"
    assert await talk.everything() == before
    await talk.complete(later)
    assert (await talk.consumed("up"))["cursor"] == 6


async def test_a_late_reply_of_an_update_that_failed_for_good_counts_before_the_next_is_claimed(
    talk: Conversation,
) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate", max_attempts=1)))
    await talk.trigger(cursor=5)
    late = await talk.lease("up")
    await talk.trigger(cursor=6)
    await talk.reap()
    await talk.complete(late)
    assert (await talk.consumed("up"))["cursor"] == 5
    assert (await talk.lease("up")).read.after == 5


async def second_scope(talk: Conversation, start: int, end: int) -> tuple[Lease, Lease]:
    await talk.deploy(dag(source(), reactive("work", "src", storage="parquet"), reactive("next", "work")))
    await talk.trigger(0, 9)
    one = await talk.lease("work")
    await talk.trigger(start, end)
    return one, await talk.lease("work")


async def test_two_overlapping_partitions_at_once_leave_one(talk: Conversation, both: Interleaver) -> None:
    one, two = await second_scope(talk, 5, 14)
    seen = await both.run(lambda c: c.complete_scope(one), lambda c: c.complete_scope(two))
    assert seen.second_waited
    assert isinstance(seen.second, Invalid)
    assert seen.second.reason == "PartitionOverlap"
    assert await talk.scopes("work") == [(0, 9)]


async def test_a_covering_partition_at_once_replaces_the_smaller_one(
    talk: Conversation, both: Interleaver
) -> None:
    one, two = await second_scope(talk, 0, 19)
    seen = await both.run(lambda c: c.complete_scope(one), lambda c: c.complete_scope(two))
    assert isinstance(seen.second, CompleteResponse)
    assert await talk.scopes("work") == [(0, 19)]


async def test_overlapping_partitions_of_one_call_are_decided_one_by_one(talk: Conversation) -> None:
    one, two = await second_scope(talk, 5, 14)
    answers = await complete_tasks(
        talk.ctx,
        [
            one.completion(OutputIn(0, start=0, end=9, row_count=0)),
            two.completion(OutputIn(0, start=5, end=14, row_count=0)),
        ],
    )
    assert isinstance(answers[0], CompleteResponse)
    assert isinstance(answers[1], Invalid)
    assert answers[1].reason == "PartitionOverlap"


async def test_events_of_an_attempt_against_its_cancel(talk: Conversation, both: Interleaver) -> None:
    """Said before: it counts. Said after: it is refused and nothing moves."""
    lease = await running(talk)
    uuid: UUID = await talk.dataset("work")
    early = EventIn(dataset_uuid=uuid, start=0, end=4)
    seen = await both.run(lambda c: c.emit(lease, early), lambda c: c.cancel(lease.task_id))
    assert isinstance(seen.first, EventsResponse)
    assert await talk.scopes("work") == [(0, 4)]
    with pytest.raises(Conflict, match="canceled"):
        await talk.emit(lease, EventIn(dataset_uuid=uuid, start=5, end=9))
    assert await talk.scopes("work") == [(0, 4)]
