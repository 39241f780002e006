"""Triggers of sources with code while these are held, or their own queue is full."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.conversation import Conversation, dag, reactive, source
from tests.support.databases import ORG
from tracelake.contracts.dispatcher_api import EventIn, TriggerRequest, TriggerResponse
from tracelake.contracts.sources import SourceSummary
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.apply_backpressure import balance
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.source_requests import route_waiting
from tracelake.store import sources


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


def code(depth: int | None = None) -> dict[str, Any]:
    limit = {} if depth is None else {"max_queue_depth": depth}
    return source(operator="own", runtime="ecs_python", **limit)


async def trigger(talk: Conversation, number: int, *, bulk: bool = True) -> TriggerResponse:
    request = TriggerRequest(start=number, end=number, priority="bulk" if bulk else "normal")
    return await trigger_source(talk.ctx, "chain", "src", request)


async def loops(talk: Conversation) -> None:
    """What the Dispatcher's loops do."""
    while (found := await balance(talk.ctx)).more or found.changed:
        pass
    await route_waiting(talk.ctx)


async def fill(talk: Conversation, scopes: int) -> None:
    """Bulk work that fills the queue of the source's consumer."""
    for number in range(scopes):
        await trigger(talk, number)
        lease = await talk.lease((await talk.queued("src"))[-1])
        await talk.emit(lease, EventIn(await talk.dataset("src"), start=number, end=number))
        await talk.complete(lease)
    await loops(talk)


async def blocks(talk: Conversation) -> list[int]:
    """The first blocks of the source's waiting tasks, in their order."""
    rows = await talk.query(
        "SELECT (t.cause ->> 'start')::int AS start FROM task t JOIN job j USING (job_id)"
        " WHERE j.name = 'src' AND t.status = 'Queued' ORDER BY t.seq"
    )
    return [row["start"] for row in rows]


async def summary(talk: Conversation) -> SourceSummary:
    """The source as ``tracelake sources list`` shows it."""
    page = await talk.ctx.db.run(lambda tx: sources.page(tx, ORG, "", 10, datetime.now(UTC)))
    return page.sources[0]


async def test_bulk_triggers_wait_while_bulk_work_is_held_and_normal_ones_pass_them(
    talk: Conversation,
) -> None:
    # A running task that is bulk makes the source one whose bulk work can be held alone.
    await talk.deploy(dag(code(), reactive("down", "src", max_queue_depth=2)))
    await trigger(talk, 90)
    running = await talk.lease("src")
    await fill(talk, 2)
    [hold] = await talk.query("SELECT bulk_only FROM job_pause WHERE caused_by IS NOT NULL")
    assert hold["bulk_only"]
    kept = [await trigger(talk, number) for number in range(100, 110)]
    assert [(each.kept, each.tasks_created) for each in kept] == [(True, 0)] * 10
    answer = await trigger(talk, 200, bulk=False)
    assert (answer.kept, answer.tasks_created) == (False, 1)
    await loops(talk)
    assert await blocks(talk) == [200], "bulk ones are held"
    listed = await summary(talk)
    assert (listed.waiting, listed.waiting_for) == (10, "bulk work is held by backpressure of chain/down")

    await talk.complete(running)
    await talk.pass_time(6)
    for task in await talk.queued("down"):
        await talk.complete_scope(await talk.lease(task))
    for _ in range(3):
        await loops(talk)
        await talk.pass_time(6)
    assert await blocks(talk) == [200, *range(100, 110)]


async def test_triggers_fill_no_queue_of_a_source_with_code_beyond_its_threshold(talk: Conversation) -> None:
    await talk.deploy(dag(code(3), reactive("work", "src")))
    answers = [await trigger(talk, number) for number in range(8)]
    assert [each.kept for each in answers] == [False] * 3 + [True] * 5
    await loops(talk)
    assert await blocks(talk) == [0, 1, 2]
    assert (await summary(talk)).waiting_for == (
        "5 kept requests of chain/src wait for room in its queue (3 of 3 waiting)"
    )
    for number in range(8):
        talk.ctx.waiting_requests.clear()
        lease = await talk.lease((await talk.queued("src"))[0])
        assert lease.payload.source is not None
        assert lease.payload.source.request.start == number  # type: ignore[union-attr]
        assert talk.ctx.waiting_requests.is_set(), "room comes free: what was kept is routed at once"
        await route_waiting(talk.ctx)
        assert len(await talk.queued("src")) == min(3, 7 - number)


async def test_a_queue_full_of_bulk_tasks_has_room_for_normal_ones(talk: Conversation) -> None:
    await talk.deploy(dag(code(2), reactive("work", "src")))
    assert [(await trigger(talk, number)).kept for number in range(4)] == [False, False, True, True]
    assert [(await trigger(talk, number, bulk=False)).kept for number in range(10, 14)] == [
        False,
        False,
        True,
        True,
    ]
    await loops(talk)
    assert await blocks(talk) == [0, 1, 10, 11]
    await talk.lease((await talk.queued("src"))[2])
    await route_waiting(talk.ctx)
    assert await blocks(talk) == [0, 1, 11, 12], "a normal one goes where bulk ones still have no room"
