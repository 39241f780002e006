"""PerUpdate jobs: one task waits, one runs, and what they read together is everything, once."""

from __future__ import annotations

import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source
from tracelake.contracts.dispatcher_api import EventIn, OutputIn
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


async def deployed(talk: Conversation, **fields: object) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate", **fields)))


async def test_events_merge_into_the_one_waiting_task(talk: Conversation) -> None:
    await deployed(talk)
    created = [(await talk.trigger(cursor=cursor)).tasks_created for cursor in (3, 5, 4, 9)]
    assert created == [1, 0, 0, 0]
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto) == (-1, 9)


async def test_the_range_freezes_at_the_claim_and_the_next_task_goes_on_from_there(
    talk: Conversation,
) -> None:
    await deployed(talk)
    await talk.trigger(cursor=5)
    lease = await talk.lease("up")
    assert (await talk.trigger(cursor=8)).tasks_created == 1
    assert (await talk.trigger(cursor=9)).tasks_created == 0
    await talk.complete(lease)
    assert (await talk.consumed("up"))["cursor"] == 5
    following = await talk.lease("up")
    assert (following.read.after, following.read.upto) == (5, 9)
    await talk.complete(following)
    assert await talk.queued("up") == []


async def test_a_retry_reads_up_to_where_its_own_claim_finds_the_input(talk: Conversation) -> None:
    await deployed(talk)
    await talk.trigger(cursor=5)
    lease = await talk.lease("up")
    await talk.trigger(cursor=8)
    await talk.fail(lease)
    await talk.pass_time(10_000)
    again = await talk.lease(lease.task_id)
    assert (again.read.after, again.read.upto) == (-1, 8)
    await talk.complete(again)
    empty = await talk.lease("up")
    assert (empty.read.after, empty.read.upto) == (8, 8)


async def test_a_cursor_that_comes_again_makes_nothing(talk: Conversation) -> None:
    await deployed(talk)
    await talk.trigger(cursor=5)
    await talk.complete(await talk.lease("up"))
    assert (await talk.trigger(cursor=5)).tasks_created == 0
    assert (await talk.trigger(cursor=4)).tasks_created == 0


async def test_the_cursor_advances_by_compare_and_set(talk: Conversation) -> None:
    """Somebody else moved it: the attempt's work is not committed on top."""
    await deployed(talk)
    await talk.trigger(cursor=5)
    lease = await talk.lease("up")
    await talk.query("UPDATE consumer_cursor SET cursor = 2")
    with pytest.raises(Conflict) as refused:
        await talk.complete(lease)
    assert refused.value.reason == "InputChanged"
    assert (await talk.consumed("up"))["cursor"] == 2
    assert (await talk.lease(lease.task_id)).read.after == 2


async def test_what_ends_otherwise_advances_nothing(talk: Conversation) -> None:
    await deployed(talk, max_attempts=1)
    await talk.trigger(cursor=5)
    await talk.complete(await talk.lease("up"), status="Released")
    lease = await talk.lease("up")
    await talk.fail(lease)
    assert (await talk.consumed("up"))["cursor"] == -1
    assert await talk.queued("up") == []
    await talk.trigger(cursor=6)
    assert (await talk.lease("up")).read.after == -1


async def test_several_inputs_each_have_their_own_range(talk: Conversation) -> None:
    await talk.deploy(dag(source("a"), source("b"), reactive("up", "a", "b", strategy="PerUpdate")))
    await talk.trigger(cursor=5, job="a")
    lease = await talk.lease("up")
    assert [(i.after, i.upto) for i in lease.payload.inputs] == [(-1, 5), (-1, -1)]
    await talk.trigger(cursor=7, job="b")
    await talk.complete(lease)
    lease = await talk.lease("up")
    assert [(i.after, i.upto) for i in lease.payload.inputs] == [(5, 5), (-1, 7)]


async def test_an_input_that_does_not_trigger_is_read_as_it_is(talk: Conversation) -> None:
    quiet = {"from": {"job": "b", "output": 0}, "trigger": False}
    await talk.deploy(dag(source("a"), source("b"), reactive("up", "a", quiet, strategy="PerUpdate")))
    assert (await talk.trigger(cursor=7, job="b")).tasks_created == 0
    await talk.trigger(cursor=5, job="a")
    lease = await talk.lease("up")
    assert [(i.after, i.upto) for i in lease.payload.inputs] == [(-1, 5), (7, 7)]


async def test_partitions_are_read_up_to_the_first_gap(talk: Conversation) -> None:
    await deployed(talk)
    for start in (0, 10, 30):
        await talk.trigger(start, start + 9)
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto) == (-1, 19)
    await talk.complete(lease)
    assert await talk.queued("up") == [], "30-39 waits for what is missing before it"
    await talk.trigger(20, 29)
    assert (await talk.lease("up")).read.upto == 39


async def test_the_first_partition_need_not_begin_at_zero(talk: Conversation) -> None:
    await deployed(talk)
    await talk.trigger(100, 109)
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto) == (-1, 109)


async def test_of_overlapping_announcements_the_longest_is_read(talk: Conversation) -> None:
    await deployed(talk)
    for start, end in ((0, 9), (0, 19), (10, 14), (20, 24)):
        await talk.trigger(start, end)
    assert (await talk.lease("up")).read.upto == 24


async def test_a_partition_below_the_cursor_sends_the_job_back_to_it(talk: Conversation) -> None:
    await deployed(talk)
    await talk.trigger(100, 109)
    await talk.complete(await talk.lease("up"))
    assert (await talk.consumed("up"))["cursor"] == 109
    assert (await talk.trigger(90, 99)).tasks_created == 1
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto) == (89, 109)


async def test_a_partition_below_the_cursor_refuses_the_attempt_that_did_not_see_it(
    talk: Conversation,
) -> None:
    await deployed(talk)
    await talk.trigger(100, 109)
    await talk.complete(await talk.lease("up"))
    await talk.trigger(110, 119)
    lease = await talk.lease("up")
    await talk.trigger(90, 99)
    with pytest.raises(Conflict) as refused:
        await talk.complete(lease)
    assert refused.value.reason == "InputChanged"
    assert (await talk.lease(lease.task_id)).read.after == 89


async def test_a_repeated_announcement_sends_nobody_back(talk: Conversation) -> None:
    await deployed(talk)
    await talk.trigger(0, 9)
    await talk.complete(await talk.lease("up"))
    assert (await talk.trigger(0, 9)).tasks_created == 0
    assert (await talk.consumed("up"))["cursor"] == 9


async def packed(talk: Conversation, *starts: int) -> list[Lease]:
    """``up`` reads what ``work`` packs into partitions; attempts at those from ``starts`` on run."""
    await talk.deploy(
        dag(
            source(), reactive("work", "src", storage="parquet"), reactive("up", "work", strategy="PerUpdate")
        )
    )
    leases = []
    for start in starts:
        await talk.trigger(start, start + 9)
        leases.append(await talk.lease("work"))
    return leases


async def refused(talk: Conversation, lease: Lease) -> None:
    with pytest.raises(Conflict) as conflict:
        await talk.complete(lease)
    assert conflict.value.reason == "InputChanged"


async def test_a_partition_that_fills_in_what_an_update_reads_refuses_it(talk: Conversation) -> None:
    first, second = await packed(talk, 0, 10)
    await talk.complete_scope(second)
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto) == (-1, 19)
    await talk.complete_scope(first)
    await refused(talk, lease)
    await refused(talk, lease)
    assert (await talk.consumed("up"))["cursor"] == -1
    assert await talk.scopes("up") == []
    again = await talk.lease(lease.task_id)
    assert (again.read.after, again.read.upto) == (-1, 19)
    await talk.complete(again)
    assert (await talk.consumed("up"))["cursor"] == 19


async def test_a_partition_that_fills_in_what_an_update_has_read_sends_it_back(talk: Conversation) -> None:
    first, second = await packed(talk, 0, 10)
    await talk.complete_scope(second)
    await talk.complete(await talk.lease("up"))
    assert (await talk.consumed("up"))["cursor"] == 19
    await talk.complete_scope(first)
    lease = await talk.lease("up")
    assert (lease.read.after, lease.read.upto) == (-1, 19)


async def test_a_partition_that_replaces_one_of_what_an_update_reads_refuses_it(talk: Conversation) -> None:
    [small] = await packed(talk, 0)
    await talk.complete_scope(small)
    lease = await talk.lease("up")
    await talk.trigger(0, 19)
    await talk.run("work")
    await refused(talk, lease)
    assert (await talk.lease(lease.task_id)).read.upto == 19


async def test_a_partition_beyond_what_an_update_reads_refuses_nobody(talk: Conversation) -> None:
    first, second = await packed(talk, 0, 10)
    await talk.complete_scope(first)
    lease = await talk.lease("up")
    await talk.complete_scope(second)
    await talk.complete(lease)
    following = await talk.lease("up")
    assert (following.read.after, following.read.upto) == (9, 19)


async def test_what_others_commit_refuses_no_update(talk: Conversation) -> None:
    [first] = await packed(talk, 10)
    await talk.complete_scope(first)
    lease = await talk.lease("up")
    await talk.trigger(0, 9)
    assert (await talk.complete(lease)).task_status == "Completed"


async def test_events_of_an_update_that_may_have_missed_something_are_refused(talk: Conversation) -> None:
    first, second = await packed(talk, 0, 10)
    await talk.complete_scope(second)
    lease = await talk.lease("up")
    await talk.complete_scope(first)
    with pytest.raises(Conflict) as conflict:
        await talk.emit(lease, EventIn(await talk.dataset("up"), cursor=19))
    assert conflict.value.reason == "InputChanged"
    assert (await talk.output("up"))["cursor"] is None


async def test_an_update_claimed_before_an_upgrade_completes_as_it_did_then(talk: Conversation) -> None:
    first, second = await packed(talk, 0, 10)
    await talk.complete_scope(second)
    lease = await talk.lease("up")
    await talk.query("UPDATE task SET inputs = inputs #- '{0,as_of}' WHERE task_id = $1", lease.task_id)
    await talk.complete_scope(first)
    assert (await talk.complete(lease)).task_status == "Completed"


async def test_only_what_is_read_from_partitions_is_looked_at_again(talk: Conversation) -> None:
    quiet = {"from": {"job": "still", "output": 0}, "trigger": False}
    await talk.deploy(
        dag(
            source(),
            source("still"),
            source("head"),
            reactive("up", "src", quiet, "head", strategy="PerUpdate"),
            reactive("work", "src"),
        )
    )
    await talk.trigger(0, 9)
    await talk.trigger(0, 9, job="still")
    await talk.trigger(cursor=5, job="head")
    update, scope = await talk.lease("up"), await talk.lease("work")
    assert [isinstance(read.as_of, int) for read in update.payload.inputs] == [True, False, False]
    assert [isinstance(read.as_of, int) for read in scope.payload.inputs] == [False]


async def test_an_updates_own_events_are_routed_on(talk: Conversation) -> None:
    await talk.deploy(dag(source(), reactive("up", "src", strategy="PerUpdate"), reactive("chunk", "up")))
    await talk.trigger(cursor=25)
    lease = await talk.lease("up")
    uuid = await talk.dataset("up")
    await talk.complete(
        lease, OutputIn(0, start=20, end=25), events=[EventIn(uuid, start=n, end=n + 9) for n in (0, 10)]
    )
    assert len(await talk.queued("chunk")) == 3


async def test_invariant_4_the_end_of_an_update_wakes_the_next_one(talk: Conversation) -> None:
    await deployed(talk)
    await talk.trigger(cursor=5)
    lease = await talk.lease("up")
    await talk.trigger(cursor=6)
    waiting = await talk.only_queued("up")
    assert (await talk.claim(waiting)).reason == "NotReady"
    await talk.forget_wakes()
    await talk.complete(lease)
    assert await talk.due_wakes() == [waiting]
