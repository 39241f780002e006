"""Save state: what the next attempt of the same task may resume from.

Held to the same fence as a completion, in the transaction that writes: a superseded attempt changes nothing,
and one that the reaper gave up may still save until a newer one is claimed.
"""

from __future__ import annotations

from tracelake.contracts.dispatcher_api import TaskStateRequest, TaskStateResponse
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import NotFound
from tracelake.domain.task import check_may_act
from tracelake.store import operator_state, tasks
from tracelake.store.db import DeployLock, Transaction


async def save_state(ctx: StepContext, request: TaskStateRequest) -> TaskStateResponse:
    async def work(tx: Transaction) -> None:
        task = (await tasks.lock(tx, [request.task_id])).get(request.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {request.task_id}")
        check_may_act(task.state, request.attempt, request.lease_token)
        await operator_state.save(tx, task, request.state)

    with ctx.metrics.timed("save_state"):
        await ctx.db.run(work, lock=DeployLock.NONE)
    return TaskStateResponse(request.task_id, request.attempt)
