"""What upstream has committed, compared with what downstream was asked to make of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from tracelake import sqlfiles
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy
from tracelake.domain.task import TaskStatus
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "reconcile.sql")


@dataclass(frozen=True, slots=True)
class ScopePage:
    """Scopes without a task, and where the next page begins (None: this was the last)."""

    missing: list[BlockRange]
    next: BlockRange | None


@dataclass(frozen=True, slots=True)
class LastUpdate:
    """The last task of a PerUpdate job: it waits or runs, or failed for good or was canceled at a time."""

    lives: bool
    gave_up_at: datetime | None


async def reactive_jobs(tx: Transaction) -> list[tuple[UUID, ExecutionStrategy]]:
    rows = await tx.fetch(SQL.reactive_jobs)
    return [(row["job_id"], ExecutionStrategy(row["execution_strategy"])) for row in rows]


async def triggering_inputs(tx: Transaction, job_id: UUID) -> list[int]:
    return [row["input_index"] for row in await tx.fetch(SQL.triggering_inputs, job_id)]


async def missing_scopes(
    tx: Transaction, job_id: UUID, input_index: int, after: BlockRange | None, limit: int
) -> ScopePage:
    start, end = (after.start, after.end) if after else (-1, -1)
    rows = await tx.fetch(SQL.missing_scopes, job_id, input_index, start, end, limit)
    scopes = [(BlockRange(row["range_start"], row["range_end"]), row["has_task"]) for row in rows]
    return ScopePage(
        [scope for scope, has_task in scopes if not has_task], scopes[-1][0] if len(scopes) == limit else None
    )


async def last_update(tx: Transaction, job_id: UUID) -> LastUpdate:
    row = await tx.fetchrow(SQL.last_update, job_id)
    if row is None:
        return LastUpdate(lives=False, gave_up_at=None)
    status = TaskStatus(row["status"])
    gave_up = status in (TaskStatus.FAILED, TaskStatus.CANCELED)
    return LastUpdate(
        lives=status in (TaskStatus.QUEUED, TaskStatus.RUNNING),
        gave_up_at=row["ended_at"] if gave_up else None,
    )


async def moved_since(tx: Transaction, job_id: UUID, when: datetime) -> bool:
    row = await tx.fetchrow(SQL.update_moved_since, job_id, when)
    return bool(row and row["moved"])


async def idle_sources(tx: Transaction) -> list[UUID]:
    return [row["job_id"] for row in await tx.fetch(SQL.idle_sources)]
