"""Reap: an attempt whose lease ran out is given up; its task is queued again or fails.

The Dispatcher believes an attempt dead only if it could have heard it: after a start or an outage of the
database it listens for a whole lease first. The attempt's late reply still counts until a newer one is
claimed.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import structlog

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.end_attempts import AttemptOver, end_attempts
from tracelake.domain.task import Outcome, TaskStatus
from tracelake.store import clock, tasks
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.tasks import TaskRow

log = structlog.get_logger(__name__)

BATCH = 200


async def begin_listening(ctx: StepContext) -> datetime:
    """From now on heartbeats are heard."""
    return await ctx.db.run(clock.now, lock=DeployLock.NONE)


async def reap_leases(ctx: StepContext, listening_since: datetime) -> int:
    """Give up what has expired; returns how many."""

    async def find(tx: Transaction) -> list[UUID]:
        return await tasks.expired_leases(tx, listening_since, BATCH)

    async def reap(tx: Transaction) -> list[TaskRow]:
        rows = await tasks.lock(tx, expired)
        dead = [
            row
            for row in rows.values()
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
