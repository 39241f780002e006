"""Watch sources: every always-on source has its one task. The reaper restarts it, with backoff, for ever."""

from __future__ import annotations

from tracelake.dispatcher.steps.context import StepContext
from tracelake.store import outbox, reconcile, tasks
from tracelake.store.db import Transaction


async def watch_sources(ctx: StepContext) -> int:
    """Give a task to sources that have none; returns how many."""

    async def work(tx: Transaction) -> int:
        created = []
        for job_id in await reconcile.idle_sources(tx):
            created += await tasks.create_source_task(tx, ctx.entropy.uuid(), job_id, {"kind": "monitor"})
        await outbox.wake(tx, created)
        return len(created)

    return await ctx.db.run(work)
