"""Jobs: the immutable definition of a generation, cached; finding and pausing jobs; and the work that they lack.

The last part serves the reconciler: it compares what upstream has committed with the tasks that downstream has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec

from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, SourceKind, Storage, UpdateStrategy
from tracelake.domain.errors import NotFound
from tracelake.domain.task import TaskStatus
from tracelake.domain.where import Predicate
from tracelake.postgres import sqlfiles
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "jobs.sql")


@dataclass(frozen=True, slots=True)
class JobOutputRow:
    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: UUID
    version_no: int
    storage: Storage


@dataclass(frozen=True, slots=True)
class JobInputRow:
    dataset_uuid: UUID
    dataset_version: UUID
    storage: Storage
    trigger: bool
    where: Predicate | None


@dataclass(frozen=True, slots=True)
class JobDefinition:
    """A generation of a job. It never changes, so it may be cached forever."""

    job_id: UUID
    org_id: UUID
    dag_name: str
    name: str
    operator: str
    config: dict[str, Any]
    execution_strategy: ExecutionStrategy | None
    update_strategy: UpdateStrategy
    unique_key: tuple[str, ...]
    secrets: tuple[str, ...]
    udf: Any
    source_kind: SourceKind | None
    runs_code: bool
    outputs: tuple[JobOutputRow, ...]
    inputs: tuple[JobInputRow, ...] = ()


@dataclass(frozen=True, slots=True)
class ActiveJob:
    job_id: UUID
    org_id: UUID
    source_kind: SourceKind | None
    runtime: str
    paused: bool
    bulk_held: bool
    backlog: bool
    runs_code: bool

    def keeps(self, *, bulk: bool) -> bool:
        """Whether its events wait until it goes on, or behind others that do."""
        return self.paused or self.backlog or (bulk and self.bulk_held)


class JobDefinitions:
    """Cards by id, fetched once per process."""

    def __init__(self) -> None:
        self._cards: dict[UUID, JobDefinition] = {}

    async def get(self, tx: Transaction, job_ids: Iterable[UUID]) -> dict[UUID, JobDefinition]:
        wanted = set(job_ids)
        missing = [job_id for job_id in wanted if job_id not in self._cards]
        if missing:
            # Kept even if this transaction is rolled back: a
            # definition never changes, and its id is never used again.
            self._cards.update(await _load(tx, missing))
        return {job_id: self._cards[job_id] for job_id in wanted}


async def _load(tx: Transaction, job_ids: list[UUID]) -> dict[UUID, JobDefinition]:
    outputs: dict[UUID, list[JobOutputRow]] = {job_id: [] for job_id in job_ids}
    for row in await tx.fetch(SQL.outputs, job_ids):
        outputs[row["job_id"]].append(
            JobOutputRow(
                row["output_index"],
                row["output_name"],
                row["dataset_uuid"],
                row["dataset_version"],
                row["version_no"],
                Storage(row["storage"]),
            )
        )
    inputs: dict[UUID, list[JobInputRow]] = {job_id: [] for job_id in job_ids}
    for row in await tx.fetch(SQL.inputs, job_ids):
        inputs[row["job_id"]].append(
            JobInputRow(
                row["dataset_uuid"],
                row["dataset_version"],
                Storage(row["storage"]),
                row["trigger"],
                msgspec.convert(row["where_tree"], Predicate) if row["where_tree"] is not None else None,
            )
        )
    return {
        row["job_id"]: JobDefinition(
            job_id=row["job_id"],
            org_id=row["org_id"],
            dag_name=row["dag_name"],
            name=row["name"],
            operator=row["operator"],
            config=row["config"],
            execution_strategy=ExecutionStrategy(row["execution_strategy"])
            if row["execution_strategy"]
            else None,
            update_strategy=UpdateStrategy(row["update_strategy"]),
            unique_key=tuple(row["unique_key"]),
            secrets=tuple(row["secrets"]),
            udf=row["udf"],
            source_kind=SourceKind(row["source_kind"]) if row["source_kind"] else None,
            runs_code=row["runs_code"],
            outputs=tuple(outputs[row["job_id"]]),
            inputs=tuple(inputs[row["job_id"]]),
        )
        for row in await tx.fetch(SQL.definitions, job_ids)
    }


async def output_state(tx: Transaction, job_ids: Iterable[UUID]) -> dict[UUID, tuple[int, str | None]]:
    """Revision and published name of every version that these jobs write."""
    rows = await tx.fetch(SQL.output_state, list(set(job_ids)))
    return {row["dataset_version"]: (row["revision"], row["published_name"]) for row in rows}


async def active(tx: Transaction, dag_name: str, name: str) -> ActiveJob:
    job = await find_active(tx, dag_name, name)
    if job is None:
        raise NotFound("UnknownJob", f"there is no active job {dag_name}/{name}")
    return job


async def find_active(tx: Transaction, dag_name: str, name: str) -> ActiveJob | None:
    row = await tx.fetchrow(SQL.active_job, dag_name, name)
    if row is None:
        return None
    kind = SourceKind(row["source_kind"]) if row["source_kind"] else None
    return ActiveJob(
        row["job_id"],
        row["org_id"],
        kind,
        row["runtime"],
        row["paused"],
        row["bulk_held"],
        row["backlog"],
        row["runs_code"],
    )


async def is_paused(tx: Transaction, job_id: UUID) -> bool:
    """Whether anything pauses the job, whose row is locked."""
    row = await tx.fetchrow(SQL.is_paused, job_id)
    return row is not None and bool(row["paused"])


class PauseCause(StrEnum):
    """Why a job is paused. It may have several causes at once, and goes on when the last one is gone."""

    PERSON = "person"
    RECEIVER_GONE = "receiver_gone"
    """The receiver of a delivery answered that it wants no more."""


@dataclass(frozen=True, slots=True)
class PauseChange:
    """``changed``: the cause was added or lifted. ``flagged``: that stopped or resumed the job. ``paused``: the
    job's state afterwards."""

    changed: bool
    flagged: bool
    paused: bool


async def add_pause(tx: Transaction, job_id: UUID, cause: PauseCause, actor: str | None) -> PauseChange:
    row = await tx.fetchrow(SQL.add_pause, job_id, cause.value, actor)
    assert row is not None
    return PauseChange(**row)


async def lift_pause(tx: Transaction, job_id: UUID, cause: PauseCause) -> PauseChange:
    row = await tx.fetchrow(SQL.lift_pause, job_id, cause.value)
    assert row is not None
    return PauseChange(**row)


@dataclass(frozen=True, slots=True)
class ScopePage:
    """Scopes without a task, and the start of the next page (None: this was the last)."""

    missing: list[BlockRange]
    next: BlockRange | None


@dataclass(frozen=True, slots=True)
class LastUpdate:
    """The last task of a PerUpdate job: live, or given up (failed for good, canceled) at a time."""

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
    # A page counts scopes with a task as well: the next one begins behind all that were looked at.
    return ScopePage(
        [scope for scope, has_task in scopes if not has_task], scopes[-1][0] if len(scopes) == limit else None
    )


@dataclass(frozen=True, slots=True)
class TriggerRows:
    """The rows of a scope in one triggering input, as far as they are known: their number, and their files."""

    job_id: UUID
    scope: BlockRange
    input_index: int
    row_count: int | None
    files: Sequence[Mapping[str, Any]] | None


async def skippable_scopes(tx: Transaction, scopes: Sequence[tuple[UUID, BlockRange]]) -> list[TriggerRows]:
    rows = await tx.fetch(SQL.skippable_scopes, *_columns(scopes))
    return [
        TriggerRows(
            row["job_id"],
            BlockRange(row["range_start"], row["range_end"]),
            row["input_index"],
            row["row_count"],
            row["files"],
        )
        for row in rows
    ]


async def skip_scopes(tx: Transaction, scopes: Sequence[tuple[UUID, BlockRange]]) -> int:
    """Returns how many weren't skipped before."""
    return len(await tx.fetch(SQL.skip_scopes, *_columns(scopes)))


def _columns(scopes: Sequence[tuple[UUID, BlockRange]]) -> tuple[list[UUID], list[int], list[int]]:
    return (
        [job_id for job_id, _ in scopes],
        [span.start for _, span in scopes],
        [span.end for _, span in scopes],
    )


async def room(tx: Transaction, job_id: UUID) -> int | None:
    """How many more tasks may wait in a job's queue; None without a threshold."""
    row = await tx.fetchrow(SQL.room, job_id)
    return row["room"] if row else None


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
