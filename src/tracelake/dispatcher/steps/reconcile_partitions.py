"""Reconcile: whatever upstream has committed and downstream was never asked for is asked for now.

Routing misses nothing by itself; this is for jobs that were deployed after their inputs, jobs that were
paused, and as the answer to "what if". It reads committed scopes page by page, so no pass holds a long
snapshot. Work that somebody canceled, or that failed for good, is not brought back until its inputs move.
"""

from __future__ import annotations

from uuid import UUID

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.route_events import create_updates
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy
from tracelake.store import outbox, reconcile, tasks
from tracelake.store.db import DeployLock, Transaction

PAGE = 1000


async def reconcile_partitions(ctx: StepContext) -> int:
    """One full pass over every reactive job; returns how many tasks it created."""
    created = 0
    for job_id, strategy in await ctx.db.run(reconcile.reactive_jobs, lock=DeployLock.NONE):
        match strategy:
            case ExecutionStrategy.PER_UPDATE:
                created += await _reconcile_updates(ctx, job_id)
            case ExecutionStrategy.PER_PARTITION:
                created += await _reconcile_scopes(ctx, job_id)
    ctx.metrics.reconciled.inc(created)
    return created


async def _reconcile_updates(ctx: StepContext, job_id: UUID) -> int:
    """A task that lives is enough: it reads up to where its inputs are, and its end looks for more."""

    async def work(tx: Transaction) -> int:
        await tasks.lock_gates(tx, [job_id])
        last = await reconcile.last_update(tx, job_id)
        if last.lives:
            return 0
        if last.gave_up_at is not None and not await reconcile.moved_since(tx, job_id, last.gave_up_at):
            return 0
        created = await create_updates(ctx, tx, [job_id])
        await outbox.wake(tx, created)
        return len(created)

    return await ctx.db.run(work)


async def _reconcile_scopes(ctx: StepContext, job_id: UUID) -> int:
    created = 0
    for input_index in await ctx.db.run(
        lambda tx: reconcile.triggering_inputs(tx, job_id), lock=DeployLock.NONE
    ):
        after: BlockRange | None = None
        while True:
            page_created, after = await _reconcile_page(ctx, job_id, input_index, after)
            created += page_created
            if after is None:
                break
    return created


async def _reconcile_page(
    ctx: StepContext, job_id: UUID, input_index: int, after: BlockRange | None
) -> tuple[int, BlockRange | None]:
    async def work(tx: Transaction) -> tuple[int, BlockRange | None]:
        page = await reconcile.missing_scopes(tx, job_id, input_index, after, PAGE)
        cause = {"kind": "reconcile"}
        created = await tasks.create_partition_tasks(
            tx, [(ctx.entropy.uuid(), job_id, span, cause) for span in page.missing]
        )
        await outbox.wake(tx, created)
        return len(created), page.next

    return await ctx.db.run(work)
