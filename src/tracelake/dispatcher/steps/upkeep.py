"""Upkeep steps that the loops run: reap leases, re-wake tasks, reconcile, watch sources; register lease holders.

Reap: an attempt whose lease ran out is given up, and its task is queued again or fails. The Dispatcher gives an
attempt up only if it could have received its heartbeats: after a start or an outage of the database it listens for
a whole lease first. The attempt's late completion still counts until a newer one is claimed.

Re-wake: ready tasks that no worker has claimed get another wake-up, so a lost message costs only time.

Reconcile: creates the tasks for committed scopes that no task covers yet. Routing misses none by itself; this is
for jobs that were deployed after their inputs or were paused, and a safety net. It reads committed scopes page by
page, so no pass holds a long snapshot. Work that was canceled, or failed for good, is not repeated until its inputs
change.

Watch sources: every always-on source has one task. The reaper restarts it, with backoff, forever.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import structlog

from tracelake.contracts.bundles import InvokerRegistration
from tracelake.contracts.dispatcher_api import WorkerRegistration
from tracelake.dispatcher.steps.complete_task import AttemptOver, end_attempts
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.route_events import create_updates
from tracelake.dispatcher.steps.skip_scopes import skip_scopes
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy
from tracelake.domain.runtimes import LAMBDA
from tracelake.domain.task import Outcome, TaskStatus
from tracelake.store import db, functions, jobs, outbox, tasks, waiting
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.tasks import TaskRow

REAP_BATCH = 200
REWAKE_BATCH = 500
BACKLOG = 1000
PAGE = 1000


log = structlog.get_logger(__name__)


async def begin_listening(ctx: StepContext) -> datetime:
    """The database's time from which on heartbeats are received."""
    return await ctx.db.run(db.database_now, lock=DeployLock.NONE)


async def reap_leases(ctx: StepContext, listening_since: datetime) -> int:
    """Give up attempts whose lease has expired; returns their number."""

    async def find(tx: Transaction) -> list[UUID]:
        return await tasks.expired_leases(tx, listening_since, REAP_BATCH)

    async def reap(tx: Transaction) -> list[TaskRow]:
        rows = await tasks.lock(tx, expired)
        dead = [
            row
            for row in rows.values()
            # Looked at again under the lock: a heartbeat or a completion may have come since the search.
            if row.state.status is TaskStatus.RUNNING
            and row.lease_expires_at is not None
            and row.lease_expires_at < row.now
        ]
        if not dead:
            return []
        await tasks.lock_gates(tx, (row.job_id for row in dead if row.gated))
        message = "the lease ran out: no heartbeat came in time"
        await end_attempts(ctx, tx, [AttemptOver(row, Outcome.TIMED_OUT, message) for row in dead])
        return dead

    # The search takes no locks, so most passes, which find nothing, block nothing.
    expired = await ctx.db.run(find, lock=DeployLock.NONE)
    reaped = await ctx.db.run(reap) if expired else []
    ctx.metrics.lease_expiries.inc(len(reaped))
    for task in reaped:
        log.warning(
            "lease ran out",
            task_id=str(task.task_id),
            attempt=task.state.attempt,
            job_id=str(task.job_id),
            worker=task.state.worker_id,
        )
    return len(reaped)


async def rewake_queued(ctx: StepContext, after_seconds: float) -> int:
    """Does nothing while wake-ups pile up in the outbox: the queue is away, and more of them wouldn't help."""

    async def work(tx: Transaction) -> int:
        if (await outbox.lag(tx)).due > BACKLOG:
            return 0
        unwoken = await tasks.unwoken_tasks(tx, after_seconds, REWAKE_BATCH)
        await outbox.wake(tx, unwoken)
        return len(unwoken)

    rewoken = await ctx.db.run(work, lock=DeployLock.NONE)
    ctx.metrics.rewoken.inc(rewoken)
    return rewoken


async def reconcile_partitions(ctx: StepContext) -> int:
    """One full pass over every reactive job; returns how many tasks it created."""
    created = 0
    for job_id, strategy in await ctx.db.run(jobs.reactive_jobs, lock=DeployLock.NONE):
        match strategy:
            case ExecutionStrategy.PER_UPDATE:
                created += await _reconcile_updates(ctx, job_id)
            case ExecutionStrategy.PER_PARTITION:
                created += await _reconcile_scopes(ctx, job_id)
    ctx.metrics.reconciled.inc(created)
    ctx.queues.note(created=created)
    return created


async def _reconcile_updates(ctx: StepContext, job_id: UUID) -> int:
    """A live task is enough: it reads up to where its inputs are, and its end looks for more."""

    async def work(tx: Transaction) -> int:
        await tasks.lock_gates(tx, [job_id])
        last = await jobs.last_update(tx, job_id)
        if last.lives:
            return 0
        # Without new input it would fail, or be canceled, again at every pass.
        if last.gave_up_at is not None and not await jobs.moved_since(tx, job_id, last.gave_up_at):
            return 0
        created = await create_updates(ctx, tx, [job_id])
        await outbox.wake(tx, created)
        return len(created)

    return await ctx.db.run(work)


async def _reconcile_scopes(ctx: StepContext, job_id: UUID) -> int:
    created = 0
    for input_index in await ctx.db.run(lambda tx: jobs.triggering_inputs(tx, job_id), lock=DeployLock.NONE):
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
        page = await jobs.missing_scopes(tx, job_id, input_index, after, PAGE)
        cause = {"kind": "reconcile"}
        skipped = await skip_scopes(ctx, tx, [(job_id, span) for span in page.missing])
        missing = [span for span in page.missing if (job_id, span) not in skipped]
        # Like a release, it fills no queue beyond its threshold.
        room = await jobs.room(tx, job_id) if missing else None
        missing = missing if room is None else missing[:room]
        created = await tasks.create_partition_tasks(
            tx, [(ctx.entropy.uuid(), job_id, span, cause) for span in missing], kept=True
        )
        await outbox.wake(tx, created)
        return len(created), page.next

    return await ctx.db.run(work)


async def watch_sources(ctx: StepContext) -> int:
    """Create a task for each source that has none; returns their number."""

    async def work(tx: Transaction) -> int:
        created = []
        for job_id in await jobs.idle_sources(tx):
            created += await tasks.create_source_task(tx, ctx.entropy.uuid(), job_id, {"kind": "monitor"})
        await outbox.wake(tx, created)
        return len(created)

    return await ctx.db.run(work)


async def register_worker(ctx: StepContext, registration: WorkerRegistration) -> None:
    # Registrations are repeated, so one that a crash loses comes again.
    came = await ctx.db.run(
        lambda tx: waiting.register_worker(tx, registration), lock=DeployLock.NONE, durable=False
    )
    if came:
        log.info("worker registered", worker=registration.worker_id, runtime=registration.runtime)


async def register_invoker(ctx: StepContext, registration: InvokerRegistration) -> None:
    """An invoker that has just come makes the wake-ups that waited for one due at once."""

    async def work(tx: Transaction) -> bool:
        came = await functions.register_invoker(tx, registration)
        if came:
            await outbox.deliver_held_now(tx, LAMBDA)
        return came

    # Registrations are repeated, so one that a crash loses comes again.
    came = await ctx.db.run(work, lock=DeployLock.NONE, durable=False)
    if came:
        log.info("invoker registered", url=registration.url, concurrency=registration.concurrency)
    elif registration.concurrency == 0:
        log.info("invoker left", url=registration.url)
