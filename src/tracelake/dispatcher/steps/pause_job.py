"""Pause and resume: a paused job gets no new tasks and none of its tasks is claimed; nothing is lost."""

from __future__ import annotations

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.route_events import create_updates
from tracelake.store import dags, jobs, outbox, tasks
from tracelake.store.db import Transaction


async def set_job_paused(ctx: StepContext, dag: str, name: str, paused: bool, actor: str = "system") -> None:
    """Resuming wakes what waited and looks for updates that came meanwhile; scopes come by the reconciler."""

    async def work(tx: Transaction) -> None:
        job = await jobs.active(tx, dag, name)
        if not paused:
            await tasks.live_of_jobs(tx, [job.job_id])
        await tasks.lock_gates(tx, [job.job_id])
        if not await jobs.set_paused(tx, job.job_id, paused):
            return
        await dags.audit(tx, ctx.org_id, actor, "pause" if paused else "resume", {"job": f"{dag}/{name}"})
        if not paused:
            await outbox.wake(tx, await tasks.wake_queued_of_jobs(tx, [job.job_id]))
            await outbox.wake(tx, await create_updates(ctx, tx, [job.job_id]))

    await ctx.db.run(work)
    if not paused:
        ctx.missing_work.set()
