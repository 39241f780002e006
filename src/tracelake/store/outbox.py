"""The outbox: wake-ups and messages that commit with their cause, and are delivered afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from tracelake.domain.backoff import Backoff
from tracelake.postgres import sqlfiles
from tracelake.store.db import OutboxEntry, OutboxKind, Row, Transaction
from tracelake.store.tasks import NewTask

SQL = sqlfiles.load("tracelake.store.sql", "outbox.sql")


@dataclass(frozen=True, slots=True)
class OutboxLag:
    due: int
    oldest_seconds: float


async def wake(
    tx: Transaction, tasks: Sequence[NewTask], at: Sequence[datetime | None] | None = None
) -> None:
    """Add a wake-up for each task, due now or at its time; it commits with the transaction."""
    # A retry has a time of its own and is always woken; a new task of a full job is woken by a free slot.
    if at is None:
        tasks = [task for task in tasks if task.wake]
    if not tasks:
        return
    payloads: list[dict[str, Any]] = [
        {"task_id": str(task.task_id), **({"bulk": True} if task.bulk else {})} for task in tasks
    ]
    rows = await tx.fetch(
        SQL.add,
        [OutboxKind.WAKE.value] * len(tasks),
        [task.runtime for task in tasks],
        [task.task_id for task in tasks],
        payloads,
        list(at) if at is not None else [None] * len(tasks),
    )
    tx.outbox.extend(_entries(rows))


async def take_due(
    tx: Transaction, limit: int, hold_seconds: float, grace_seconds: float = 0.0
) -> list[OutboxEntry]:
    return _entries(await tx.fetch(SQL.take_due, limit, hold_seconds, grace_seconds))


async def delivered(tx: Transaction, outbox_ids: Sequence[int]) -> None:
    await tx.execute(SQL.delivered, list(outbox_ids))


async def failed(
    tx: Transaction,
    outbox_ids: Sequence[int],
    error: str,
    *,
    backoff: Backoff,
    max_tries: int,
) -> int:
    """Record a failed delivery; returns the number of entries given up."""
    rows = await tx.fetch(SQL.failed, list(outbox_ids), error, backoff.ladder(), max_tries)
    return sum(row["failed_at"] is not None for row in rows)


async def deliver_held_now(tx: Transaction, runtime: str) -> None:
    """Make deliveries of a runtime that failed and wait for their next try due at once."""
    await tx.execute(SQL.deliver_held_now, runtime)


async def replay_failed(tx: Transaction, outbox_ids: Sequence[int] | None) -> int:
    return len(await tx.fetch(SQL.replay_failed, list(outbox_ids) if outbox_ids is not None else None))


async def list_failed(tx: Transaction, limit: int) -> list[Row]:
    return await tx.fetch(SQL.list_failed, limit)


async def lag(tx: Transaction) -> OutboxLag:
    row = await tx.fetchrow(SQL.lag)
    assert row is not None
    return OutboxLag(row["due"], row["oldest_seconds"])


def _entries(rows: Sequence[Row]) -> list[OutboxEntry]:
    return [
        OutboxEntry(
            row["outbox_id"],
            OutboxKind(row["kind"]),
            row["runtime"],
            UUID(bytes=row["task_id"].bytes) if row["task_id"] else None,
            row["payload"],
            row["available_at"],
            row["due"],
            row["waited"],
        )
        for row in rows
    ]
