"""An invalidation against completions, claims, events and other invalidations of what it takes back."""

from __future__ import annotations

import asyncpg
import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tests.support.interleave import Interleaver
from tracelake.contracts.dispatcher_api import ClaimResponse, CompleteResponse, EventIn, EventsResponse
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest.fixture
def both(talk: Conversation, pool: asyncpg.Pool) -> Interleaver:
    return Interleaver(talk, pool)


async def following(talk: Conversation) -> tuple[Lease, Lease]:
    """A source at block 9 and the update that is reading it."""
    await talk.deploy(
        dag(
            source(kind="always_on", storage="postgres"),
            reactive("up", "src", strategy="PerUpdate", storage="postgres"),
        )
    )
    head = await talk.lease("src")
    await talk.emit(head, EventIn(dataset_uuid=await talk.dataset("src"), cursor=9))
    return head, await talk.lease("up")


async def test_a_completion_whose_input_is_invalidated_first_commits_nothing(
    talk: Conversation, both: Interleaver
) -> None:
    head, update = await following(talk)
    own, uuid = await talk.dataset("up"), await talk.dataset("src")
    said = EventIn(dataset_uuid=own, cursor=9)
    seen = await both.run(
        lambda c: c.emit(head, taken_back(uuid, 7, 9)), lambda c: c.complete(update, events=[said])
    )
    assert seen.second_waited
    assert isinstance(seen.second, Conflict)
    assert seen.second.reason == "InputChanged"
    assert (await talk.output("up"))["cursor"] is None
    assert await talk.status(update.task_id) == "Queued"
    again = await talk.lease(update.task_id)
    assert again.attempt == 2
    assert (again.read.after, again.read.upto) == (-1, 6)
    assert again.read.invalidation is not None
    assert (again.read.invalidation.start, again.read.invalidation.end) == (7, 9)


async def test_an_invalidation_just_after_the_completion_invalidates_its_work(
    talk: Conversation, both: Interleaver
) -> None:
    head, update = await following(talk)
    own, uuid = await talk.dataset("up"), await talk.dataset("src")
    said = EventIn(dataset_uuid=own, cursor=9)
    seen = await both.run(
        lambda c: c.complete(update, events=[said]), lambda c: c.emit(head, taken_back(uuid, 7, 9))
    )
    assert seen.second_waited
    assert isinstance(seen.first, CompleteResponse)
    assert isinstance(seen.second, EventsResponse)
    assert (await talk.output("up"))["cursor"] == 6
    assert (await talk.consumed("up"))["cursor"] == 6
    undo = await talk.lease("up")
    assert (undo.read.after, undo.read.upto) == (6, 6)
    assert undo.read.invalidation is not None


async def test_the_same_holds_for_a_scope(talk: Conversation, both: Interleaver) -> None:
    await talk.deploy(dag(source(), reactive("made", "src"), reactive("read", "made")))
    await talk.trigger(0, 9)
    await talk.run("made")
    reading = await talk.lease("read")
    await talk.trigger(10, 19)
    speaker = await talk.lease("made")
    back = taken_back(await talk.dataset("made"), 0, 4)
    seen = await both.run(lambda c: c.emit(speaker, back), lambda c: c.complete_scope(reading))
    assert seen.second_waited
    assert isinstance(seen.second, Conflict)
    assert seen.second.reason == "InputChanged"
    assert await talk.scopes("read") == []


async def test_invariant_3_one_invalidation_sent_twice_at_once_is_one(
    talk: Conversation, both: Interleaver
) -> None:
    head, _ = await following(talk)
    back = taken_back(await talk.dataset("src"), 7, 9)
    seen = await both.run(lambda c: c.emit(head, back), lambda c: c.emit(head, back))
    assert seen.second_waited
    assert isinstance(seen.first, EventsResponse)
    assert isinstance(seen.second, EventsResponse)
    assert seen.first.events == seen.second.events
    assert (await talk.output("src"))["revision"] == 1


async def test_two_invalidations_of_one_range_at_once_are_both_undone(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.deploy(
        dag(
            source("one", kind="always_on", storage="postgres"),
            source("two", kind="always_on", storage="postgres"),
            reactive("up", "one", "two", strategy="PerUpdate"),
        )
    )
    heads = [await talk.lease("one"), await talk.lease("two")]
    uuids = [await talk.dataset("one"), await talk.dataset("two")]
    for head, uuid in zip(heads, uuids, strict=True):
        await talk.emit(head, EventIn(dataset_uuid=uuid, cursor=9))
    await talk.complete(await talk.lease("up"))
    seen = await both.run(
        lambda c: c.emit(heads[0], taken_back(uuids[0], 5, 9)),
        lambda c: c.emit(heads[1], taken_back(uuids[1], 3, 9)),
    )
    assert seen.second_waited, "they meet on the consumer's row"
    undo = await talk.lease("up")
    assert [(i.after, i.invalidation.start) for i in undo.payload.inputs if i.invalidation] == [
        (4, 5),
        (2, 3),
    ]


async def test_different_invalidations_of_one_range_follow_each_other(
    talk: Conversation, both: Interleaver
) -> None:
    head, update = await following(talk)
    uuid = await talk.dataset("src")
    await talk.complete(update)
    seen = await both.run(
        lambda c: c.emit(head, taken_back(uuid, 7, 9, "a")),
        lambda c: c.emit(head, taken_back(uuid, 5, 9, "b")),
    )
    assert seen.second_waited
    assert (await talk.output("src"))["revision"] == 2
    assert (await talk.output("src"))["cursor"] == 4
    undo = await talk.lease("up")
    assert undo.read.invalidation is not None
    assert (undo.read.invalidation.start, undo.read.invalidation.end) == (5, 9)
    assert undo.read.invalidation.revision == 2


@pytest.mark.parametrize("claim_first", [True, False])
async def test_a_claim_against_an_invalidation_reads_before_or_after_it_never_between(
    talk: Conversation, both: Interleaver, claim_first: bool
) -> None:
    """Read before, the completion is refused; read after, it knows what to undo and may commit."""
    head, update = await following(talk)
    uuid = await talk.dataset("src")
    await talk.complete(update, status="Released")

    async def claim(c: Conversation) -> ClaimResponse:
        return await c.claim(update.task_id)

    async def back(c: Conversation) -> object:
        return await c.emit(head, taken_back(uuid, 7, 9))

    answer = (await both.run(claim, back)).first if claim_first else (await both.run(back, claim)).second
    assert isinstance(answer, ClaimResponse)
    assert answer.task is not None
    assert answer.lease_token is not None
    read = answer.task.inputs[0]
    lease = Lease(update.task_id, answer.task.attempt, answer.lease_token, answer.task, "w1")
    if read.revision == 0:
        assert read.upto == 9
        with pytest.raises(Conflict) as refused:
            await talk.complete(lease)
        assert refused.value.reason == "InputChanged"
    else:
        assert read.upto == 6
        await talk.complete(lease)


async def test_an_event_of_the_old_revision_against_the_invalidation_does_not_count(
    talk: Conversation, both: Interleaver
) -> None:
    head, _ = await following(talk)
    uuid = await talk.dataset("src")
    old = EventIn(dataset_uuid=uuid, cursor=12, revision=0)
    seen = await both.run(lambda c: c.emit(head, taken_back(uuid, 7, 9)), lambda c: c.emit(head, old))
    assert isinstance(seen.second, EventsResponse)
    assert seen.second.events[0].state == "old_revision"
    assert (await talk.output("src"))["cursor"] == 6


async def test_work_that_no_invalidation_touches_is_not_refused(
    talk: Conversation, both: Interleaver
) -> None:
    await talk.deploy(dag(source(), reactive("made", "src"), reactive("read", "made")))
    for start in (0, 10):
        await talk.trigger(start, start + 9)
        await talk.run("made")
    low, high = await talk.queued("read")
    reading = await talk.lease(high)
    await talk.trigger(20, 29)
    speaker = await talk.lease("made")
    back = taken_back(await talk.dataset("made"), 0, 9)
    seen = await both.run(lambda c: c.emit(speaker, back), lambda c: c.complete_scope(reading))
    assert isinstance(seen.second, CompleteResponse)
    assert await talk.scopes("read") == [(10, 19)]
    assert await talk.status(low) == "Queued"
