"""Retry by a person: at once, with a full set of attempts, also when none were left."""

from __future__ import annotations

from uuid import UUID

from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict, NotFound
from tracelake.domain.task import TaskKind, TaskStatus
from tracelake.store import dags, outbox, tasks
from tracelake.store.db import Transaction
from tracelake.store.tasks import NewTask


async def retry_task(ctx: StepContext, task_id: UUID, actor: str = "system") -> None:
    """For what has failed or was canceled, and to bring forward a retry that waits for its time."""

    async def work(tx: Transaction) -> None:
        task = (await tasks.lock(tx, [task_id])).get(task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {task_id}")
        if task.state.status in (TaskStatus.RUNNING, TaskStatus.COMPLETED):
            raise Conflict("NotRetryable", f"the task is {task.state.status}")
        if not task.state.job_active:
            raise Conflict("JobRetired", "the task's job was replaced or removed by a deploy")
        if task.state.kind is TaskKind.CURSOR:
            await tasks.lock_gates(tx, [task.job_id])
            if await tasks.superseded(tx, task):
                raise Conflict("Superseded", "a later task of this job covers what this one would do")
        await tasks.requeue(tx, task_id)
        await outbox.wake(tx, [NewTask(task_id, task.runtime)])
        await dags.audit(tx, ctx.org_id, actor, "retry", {"task_id": str(task_id)})

    await ctx.db.run(work)
