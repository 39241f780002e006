"""Events as they are kept: every one, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from tracelake import sqlfiles
from tracelake.domain.events import EventState
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "events.sql")


@dataclass(frozen=True, slots=True)
class EventRow:
    org_id: UUID
    dataset_version: UUID
    task_id: UUID | None
    attempt: int | None
    kind: str
    bounds: tuple[int, int]
    revision: int
    state: EventState

    @property
    def key(self) -> tuple[UUID, UUID | None, str, int, int]:
        return self.dataset_version, self.task_id, self.kind, *self.bounds


async def count_of_attempt(tx: Transaction, task_id: UUID, attempt: int, most: int) -> int:
    rows = await tx.fetch(SQL.count_of_attempt, task_id, attempt, most)
    count: int = rows[0][0]
    return count


async def record(tx: Transaction, events: Sequence[EventRow]) -> list[int]:
    """Keep the events; returns their ids in the order given."""
    if not events:
        return []
    unique = list({(event.key, event.attempt, event.revision): event for event in events}.values())
    rows = await tx.fetch(
        SQL.record_events,
        [event.org_id for event in unique],
        [event.dataset_version for event in unique],
        [event.task_id for event in unique],
        [event.attempt for event in unique],
        [event.kind for event in unique],
        [event.bounds[0] for event in unique],
        [event.bounds[1] for event in unique],
        [event.revision for event in unique],
        [event.state.value for event in unique],
    )
    ids = {
        (row["dataset_version"], row["task_id"], row["kind"], row["range_start"], row["range_end"]): row[
            "event_id"
        ]
        for row in rows
    }
    return [ids[event.key] for event in events]
