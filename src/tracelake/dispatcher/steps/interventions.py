"""Interventions by people: cancel and retry a task, pause and resume a job.

A cancel takes effect at once; a running attempt learns of it by its next heartbeat. A retry queues a task at once
with a full set of attempts, also when none were left. A paused job gets no new tasks and none of its tasks is
claimed, but its events are kept. It may be paused for several causes, and goes on when the last one is lifted.
"""

from __future__ import annotations

from uuid import UUID

from tracelake.dispatcher.steps.complete_task import wake_next
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.route_events import create_updates
from tracelake.domain.errors import Conflict, NotFound
from tracelake.domain.task import TaskKind, TaskStatus
from tracelake.store import dags, jobs, outbox, tasks
from tracelake.store.db import Transaction
from tracelake.store.jobs import PauseCause, PauseChange
from tracelake.store.tasks import NewTask


async def cancel_task(ctx: StepContext, task_id: UUID, actor: str = "system") -> None:
    """Canceling a canceled task has no effect; one that has ended otherwise is a conflict."""

    async def work(tx: Transaction) -> None:
        task = (await tasks.lock(tx, [task_id])).get(task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {task_id}")
        match task.state.status:
            case TaskStatus.CANCELED:
                # A deploy's cancel is undone by a rollback; a person's must last.
                await tasks.keep_canceled(tx, task_id, f"canceled by {actor}")
            case TaskStatus.COMPLETED | TaskStatus.FAILED:
                raise Conflict("AlreadyEnded", f"the task is {task.state.status} already")
            case TaskStatus.QUEUED | TaskStatus.RUNNING:
                if task.gated:
                    await tasks.lock_gates(tx, [task.job_id])
                await tasks.cancel(tx, [task_id], f"canceled by {actor}")
                # A running one has freed a slot, and a queued one
                # may have been woken for a slot that it won't use.
                await wake_next(ctx, tx, [task])
                await dags.audit(tx, ctx.org_id, actor, "cancel", {"task_id": str(task_id)})

    await ctx.db.run(work)


async def retry_task(ctx: StepContext, task_id: UUID, actor: str = "system") -> None:
    """For a task that failed or was canceled, and to bring a waiting retry forward."""

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
            # The later task reads from the same cursor, and this one would do its work a second time.
            if await tasks.superseded(tx, task):
                raise Conflict("Superseded", "a later task of this job covers what this one would do")
        await tasks.requeue(tx, task_id)
        await outbox.wake(tx, [NewTask(task_id, task.runtime, bulk=task.is_bulk)])
        await dags.audit(tx, ctx.org_id, actor, "retry", {"task_id": str(task_id)})

    await ctx.db.run(work)


async def pause_job(
    ctx: StepContext, dag: str, name: str, actor: str = "system", cause: PauseCause = PauseCause.PERSON
) -> None:
    """Pausing again for the same cause has no effect."""

    async def work(tx: Transaction) -> None:
        job = await jobs.active(tx, dag, name)
        await tasks.lock_gates(tx, [job.job_id])
        change = await jobs.add_pause(tx, job.job_id, cause, actor)
        if change.changed or change.flagged:
            await _audit_pause(ctx, tx, actor, "pause", f"{dag}/{name}", cause)

    await ctx.db.run(work)
    ctx.queues.look_soon()


async def resume_job(
    ctx: StepContext, dag: str, name: str, actor: str = "system", cause: PauseCause = PauseCause.PERSON
) -> bool:
    """Lift one cause; returns whether others keep the job paused. If none does, wake what waited and look for
    updates that came meanwhile; the reconciler finds the scopes."""

    async def work(tx: Transaction) -> PauseChange:
        job = await jobs.active(tx, dag, name)
        # Locks the tasks that are woken below: tasks come before jobs in the order of locks.
        await tasks.live_of_jobs(tx, [job.job_id])
        await tasks.lock_gates(tx, [job.job_id])
        change = await jobs.lift_pause(tx, job.job_id, cause)
        if change.changed or change.flagged:
            await _audit_pause(ctx, tx, actor, "resume", f"{dag}/{name}", cause)
        if change.flagged:
            await outbox.wake(tx, await tasks.wake_queued_of_jobs(tx, [job.job_id]))
            await outbox.wake(tx, await create_updates(ctx, tx, [job.job_id]))
        return change

    change = await ctx.db.run(work)
    # After the commit, or the reconciler would still see the job paused.
    if not change.paused:
        ctx.missing_work.set()
        ctx.waiting_requests.set()
    ctx.queues.look_soon()
    return change.paused


async def _audit_pause(
    ctx: StepContext, tx: Transaction, actor: str, action: str, job: str, cause: PauseCause
) -> None:
    await dags.audit(tx, ctx.org_id, actor, action, {"job": job, "cause": cause.value})
