"""Re-wake: ready tasks that nobody has claimed get another wake-up. A lost message costs time, nothing else."""

from __future__ import annotations

from tracelake.dispatcher.steps.context import StepContext
from tracelake.store import outbox, tasks
from tracelake.store.db import DeployLock, Transaction

BATCH = 500


async def rewake_queued(ctx: StepContext, after_seconds: float) -> int:
    async def work(tx: Transaction) -> int:
        unwoken = await tasks.unwoken_tasks(tx, after_seconds, BATCH)
        await outbox.wake(tx, unwoken)
        return len(unwoken)

    rewoken = await ctx.db.run(work, lock=DeployLock.NONE)
    ctx.metrics.rewoken.inc(rewoken)
    return rewoken
