"""Where a source stands with its outputs: what its claim tells it, and what it hears of what others have said."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tracelake.contracts.dispatcher_api import EventIn, InvalidateRange, PayloadWritten
from tracelake.dispatcher.steps.context import StepContext

CHECK = reactive(
    "check", "src", strategy="PerUpdate", operator="integrity_check", outputs=1, config={"rpc_pool": "main"}
)


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


async def following(talk: Conversation) -> tuple[Lease, UUID]:
    """A source that has come to block 99, of which 90 are final."""
    await talk.deploy(dag(source(kind="always_on", storage="postgres"), CHECK))
    lease, uuid = await talk.lease("src"), await talk.dataset("src")
    assert lease.payload.outputs[0].written == PayloadWritten(None, None, [])
    await talk.emit(lease, EventIn(uuid, cursor=99, finalized=90, revision=0))
    return lease, uuid


async def again(talk: Conversation, lease: Lease) -> tuple[Lease, PayloadWritten]:
    """The source is handed back and claimed again."""
    await talk.complete(lease, status="Released")
    lease = await talk.lease("src")
    written = lease.payload.outputs[0].written
    assert written is not None
    return lease, written


async def test_a_claim_says_how_far_the_source_has_come(talk: Conversation) -> None:
    lease, _ = await following(talk)
    _, written = await again(talk, lease)
    assert written == PayloadWritten(99, 90, [])


async def test_the_same_claim_again_says_it_too(talk: Conversation) -> None:
    lease, _ = await following(talk)
    await talk.complete(lease, status="Released")
    first = await talk.claim(lease.task_id, key="k")
    second = await talk.claim(lease.task_id, key="k")
    assert first.task is not None
    assert second.task is not None
    assert first.task.outputs[0].written == second.task.outputs[0].written == PayloadWritten(99, 90, [])


async def test_what_others_took_back_is_listed_until_it_was_written_again(talk: Conversation) -> None:
    lease, uuid = await following(talk)
    check = await talk.lease("check")
    wrong = ((10, 12), (13, 20), (50, 50))
    await talk.emit(check, *(taken_back(uuid, start, end, f"wrong-{start}") for start, end in wrong))
    lease, written = await again(talk, lease)
    assert written == PayloadWritten(9, 9, [InvalidateRange(10, 20), InvalidateRange(50, 50)])
    revision = lease.payload.outputs[0].revision
    answer = await talk.emit(lease, EventIn(uuid, cursor=99, finalized=90, revision=revision))
    assert answer.events[0].state == "counted"
    _, written = await again(talk, lease)
    assert written == PayloadWritten(99, 90, [])


async def test_a_source_that_has_not_heard_of_it_does_not_pass_over_what_was_taken_back(
    talk: Conversation,
) -> None:
    lease, uuid = await following(talk)
    check = await talk.lease("check")
    await talk.emit(check, taken_back(uuid, 10, 12, "wrong-1"))
    answer = await talk.emit(lease, EventIn(uuid, cursor=100, revision=0))
    assert [(event.state, event.revision) for event in answer.events] == [("old_revision", 1)]
    assert (await talk.output("src"))["cursor"] == 9


async def test_what_a_source_took_back_itself_is_not_listed(talk: Conversation) -> None:
    lease, uuid = await following(talk)
    reorg = [taken_back(uuid, 98, 99, "reorg-1"), EventIn(uuid, cursor=98, revision=1)]
    answer = await talk.emit(lease, *reorg)
    assert [event.state for event in answer.events] == ["counted", "counted"]
    _, written = await again(talk, lease)
    assert written == PayloadWritten(98, 90, [])


async def test_a_reorg_beside_what_others_took_back_does_not_hide_it(talk: Conversation) -> None:
    lease, uuid = await following(talk)
    check = await talk.lease("check")
    await talk.emit(check, taken_back(uuid, 10, 12, "wrong-1"))
    reorg = [taken_back(uuid, 98, 99, "reorg-1"), EventIn(uuid, cursor=99, revision=1)]
    answer = await talk.emit(lease, *reorg)
    assert [event.state for event in answer.events] == ["counted", "old_revision"]
    _, written = await again(talk, lease)
    assert written == PayloadWritten(9, 9, [InvalidateRange(10, 12)])


async def test_other_tasks_are_told_nothing_of_the_kind(talk: Conversation) -> None:
    await following(talk)
    check = await talk.lease("check")
    assert check.payload.outputs[0].written is None
