"""Re-wake: ready tasks that nobody has claimed get another wake-up. A lost message costs time, nothing else."""

from __future__ import annotations

from tracelake.dispatcher.steps.context import StepContext
from tracelake.store import outbox, tasks
from tracelake.store.db import DeployLock, Transaction

BATCH = 500
BACKLOG = 1000


async def rewake_queued(ctx: StepContext, after_seconds: float) -> int:
    """While wake-ups pile up in the outbox, more of them would help nobody: the queue is away."""

    async def work(tx: Transaction) -> int:
        if (await outbox.lag(tx)).due > BACKLOG:
            return 0
        unwoken = await tasks.unwoken_tasks(tx, after_seconds, BATCH)
        await outbox.wake(tx, unwoken)
        return len(unwoken)

    rewoken = await ctx.db.run(work, lock=DeployLock.NONE)
    ctx.metrics.rewoken.inc(rewoken)
    return rewoken
