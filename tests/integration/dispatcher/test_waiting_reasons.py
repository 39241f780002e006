"""Each reason to wait, as it comes about, over HTTP: of one task, in a list, and in an explanation alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from tests.support.conversation import Conversation, dag, reactive, source, taken_back
from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.dispatcher.steps.context import StepContext

FIRST = reactive("first", "src", runtime="ecs_python")
SECOND = reactive("second", "first", runtime="ecs_python")


@pytest.fixture
def talk(ctx: StepContext) -> Conversation:
    return Conversation(ctx)


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


async def waits(api: Surfaces, task_id: UUID) -> dict[str, Any]:
    """The reason, which is the same wherever it is asked for."""
    shown = (await api.person.get(f"/v1/tasks/{task_id}")).json()["waiting_for"]
    listed = (await api.person.get("/v1/tasks", params={"status": "Queued"})).json()["tasks"]
    assert {each["task_id"]: each["waiting_for"] for each in listed}[str(task_id)] == shown
    explained = (await api.person.get(f"/v1/tasks/{task_id}/explain")).json()["waiting_for"]
    assert explained == shown
    return shown


async def test_an_update_waits_for_the_one_before_it(talk: Conversation, api: Surfaces) -> None:
    await talk.deploy(dag(source(), reactive("work", "src", strategy="PerUpdate")))
    await talk.trigger(cursor=1)
    lease = await talk.lease("work")
    await talk.trigger(cursor=2)
    task = await talk.only_queued("work")
    assert (await waits(api, task))["reason"] == "EarlierTask"
    await talk.complete(lease, status="Canceled")
    assert (await waits(api, task))["reason"] == "Worker"


async def test_a_range_that_was_invalidated_waits_for_its_inputs(talk: Conversation, api: Surfaces) -> None:
    await talk.deploy(dag(source(), FIRST, SECOND))
    await talk.trigger(0, 9)
    await talk.run("first")
    task = await talk.only_queued("second")
    assert (await waits(api, task))["reason"] == "Worker"
    await talk.trigger(10, 19)
    other = await talk.lease("first")
    await talk.emit(other, taken_back(await talk.dataset("first"), 0, 9))
    found = await waits(api, task)
    assert found["reason"] == "Inputs"
    assert "isn't committed again in " in found["message"]


async def test_a_task_whose_wake_up_fails_says_why(talk: Conversation, api: Surfaces) -> None:
    await talk.deploy(dag(source(), FIRST))
    await talk.trigger(0, 9)
    task = await talk.only_queued("first")
    await talk.query("UPDATE outbox SET tries = 3, last_error = 'the queue is away' RETURNING 1")
    found = await waits(api, task)
    assert (found["reason"], found["message"]) == (
        "Delivery",
        "it can't be delivered yet: the queue is away",
    )


async def test_a_retry_names_the_error_and_the_time(talk: Conversation, api: Surfaces) -> None:
    await talk.deploy(dag(source(), FIRST))
    await talk.trigger(0, 9)
    lease = await talk.lease("first")
    await talk.fail(lease)
    found = await waits(api, lease.task_id)
    assert found["reason"] == "RetryTime"
    assert found["until"] is not None
    assert found["message"].endswith("the last attempt: it broke")


async def test_a_task_of_a_job_that_is_gone_says_so(talk: Conversation, api: Surfaces) -> None:
    """A deploy cancels them; one that a Dispatcher of an older release has made meanwhile is left."""
    await talk.deploy(dag(source(), FIRST))
    await talk.trigger(0, 9)
    task = await talk.only_queued("first")
    await talk.query("UPDATE job SET active = false WHERE name = 'first' RETURNING 1")
    assert (await waits(api, task))["reason"] == "JobRetired"


async def test_an_older_task_of_the_same_scope_gives_way(talk: Conversation, api: Surfaces) -> None:
    await talk.deploy(dag(source(), FIRST))
    await talk.trigger(0, 9)
    task = await talk.only_queued("first")
    await talk.query(
        "INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key)"
        " SELECT gen_random_uuid(), org_id, job_id, kind, status, range_start, range_end, 'later' FROM task"
        " WHERE task_id = $1 RETURNING 1",
        task,
    )
    assert (await waits(api, task))["reason"] == "LaterTask"
