"""Cancel: at once, whoever holds the task. A running attempt hears of it by its next heartbeat."""

from __future__ import annotations

from uuid import UUID

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.end_attempts import wake_next
from tracelake.domain.errors import Conflict, NotFound
from tracelake.domain.task import TaskStatus
from tracelake.store import dags, tasks
from tracelake.store.db import Transaction


async def cancel_task(ctx: StepContext, task_id: UUID, actor: str = "system") -> None:
    """Canceling twice is canceling once; a task that has ended otherwise can't be canceled any more."""

    async def work(tx: Transaction) -> None:
        task = (await tasks.lock(tx, [task_id])).get(task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {task_id}")
        match task.state.status:
            case TaskStatus.CANCELED:
                await tasks.keep_canceled(tx, task_id, f"canceled by {actor}")
            case TaskStatus.COMPLETED | TaskStatus.FAILED:
                raise Conflict("AlreadyEnded", f"the task is {task.state.status} already")
            case TaskStatus.QUEUED | TaskStatus.RUNNING:
                if task.gated:
                    await tasks.lock_gates(tx, [task.job_id])
                await tasks.cancel(tx, [task_id], f"canceled by {actor}")
                await wake_next(tx, [task])
                await dags.audit(tx, ctx.org_id, actor, "cancel", {"task_id": str(task_id)})

    await ctx.db.run(work)
