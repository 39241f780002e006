"""Invalidations: records them, rewinds cursors, uncommits partitions, and finds dependents and affected tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, UpdateStrategy
from tracelake.postgres import sqlfiles
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "invalidations.sql")


@dataclass(frozen=True, slots=True)
class KnownInvalidation:
    revision: int
    range: BlockRange


@dataclass(frozen=True, slots=True)
class Dependent:
    """A job that reads the invalidated version, and one version that it writes (None: it writes nothing)."""

    job_id: UUID
    strategy: ExecutionStrategy
    replaces: bool
    active: bool
    output_version: UUID | None


@dataclass(frozen=True, slots=True)
class Hull:
    """A version's committed part of a range."""

    partitions: BlockRange | None
    cursor_beyond: bool


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A source's position in an output, and the ranges that it has to write again."""

    cursor: int | None
    finalized: int | None
    taken_back: tuple[BlockRange, ...]


@dataclass(frozen=True, slots=True)
class UsedScope:
    """A scope that a task worked on: a version at a revision, over a range."""

    task_id: UUID
    dataset_version: UUID
    revision: int
    start: int
    end: int


async def written_by_source(tx: Transaction, job_id: UUID, task_id: UUID) -> dict[UUID, SourcePosition]:
    """By dataset version, for the outputs of a source and its task."""
    rows = await tx.fetch(SQL.written_by_source, job_id, task_id)
    return {
        row["dataset_version"]: SourcePosition(
            row["cursor"],
            row["finalized"],
            tuple(map(BlockRange, row["starts"] or (), row["ends"] or ())),
        )
        for row in rows
    }


async def known(tx: Transaction, version: UUID, invalidation_id: str) -> KnownInvalidation | None:
    row = await tx.fetchrow(SQL.known_invalidation, version, invalidation_id)
    if row is None:
        return None
    return KnownInvalidation(row["revision"], BlockRange(row["range_start"], row["range_end"]))


async def known_ids(tx: Transaction, version: UUID, ids: Sequence[str]) -> set[str]:
    rows = await tx.fetch(SQL.known_invalidations, version, list(ids))
    return {row["invalidation_id"] for row in rows}


async def downstream(tx: Transaction, version: UUID) -> tuple[set[UUID], set[UUID]]:
    """All versions and all jobs that an invalidation of ``version`` may reach, itself included."""
    rows = await tx.fetch(SQL.downstream, version)
    versions = {row["dataset_version"] for row in rows if row["dataset_version"]}
    jobs = {row["job_id"] for row in rows if row["job_id"]}
    return versions, jobs


async def record(
    tx: Transaction,
    version: UUID,
    invalidation_id: str,
    span: BlockRange,
    reason: str | None,
    task_id: UUID | None,
) -> int:
    """Raise the version's revision and record the reason; returns the new revision."""
    row = await tx.fetchrow(SQL.raise_revision, version)
    assert row is not None
    revision: int = row["revision"]
    await tx.execute(
        SQL.record_invalidation, version, invalidation_id, span.start, span.end, revision, reason, task_id
    )
    return revision


async def rewind_producer(tx: Transaction, version: UUID, start: int) -> None:
    await tx.execute(SQL.rewind_producer, version, start)


async def uncommit(tx: Transaction, version: UUID, span: BlockRange) -> list[BlockRange]:
    rows = await tx.fetch(SQL.uncommit_partitions, version, span.start, span.end)
    return [BlockRange(row["range_start"], row["range_end"]) for row in rows]


async def rewind_consumers(tx: Transaction, version: UUID, span: BlockRange, revision: int) -> set[UUID]:
    """Rewind consumers; returns the jobs that have something to undo."""
    rows = await tx.fetch(SQL.rewind_consumers, version, span.start, span.end, revision)
    return {row["job_id"] for row in rows}


async def rewind_job(tx: Transaction, job_id: UUID, start: int) -> None:
    """Rewind a PerUpdate job, so that it repeats what it derived from ``start`` and later."""
    await tx.execute(SQL.rewind_job, job_id, start)


async def dependents(tx: Transaction, version: UUID) -> list[Dependent]:
    return [
        Dependent(
            row["job_id"],
            ExecutionStrategy(row["execution_strategy"]),
            row["update_strategy"] == UpdateStrategy.REPLACE.value,
            row["active"],
            row["dataset_version"],
        )
        for row in await tx.fetch(SQL.consumers_with_outputs, version)
    ]


async def hull(tx: Transaction, version: UUID, span: BlockRange) -> Hull:
    row = await tx.fetchrow(SQL.materialized_hull, version, span.start, span.end)
    assert row is not None
    partitions = BlockRange(row["first"], row["last"]) if row["first"] is not None else None
    return Hull(partitions, row["cursor_beyond"])


async def changed_meanwhile(tx: Transaction, used: Sequence[UsedScope]) -> set[UUID]:
    """The tasks of ``used`` whose scopes were invalidated since."""
    if not used:
        return set()
    rows = await tx.fetch(
        SQL.overlapping_invalidations,
        [use.task_id for use in used],
        [use.dataset_version for use in used],
        [use.revision for use in used],
        [use.start for use in used],
        [use.end for use in used],
    )
    return {row["task_id"] for row in rows}


async def scope_revisions(tx: Transaction, scopes: Sequence[tuple[UUID, int, int]]) -> list[int]:
    """The revision of each scope, in the order given."""
    if not scopes:
        return []
    rows = await tx.fetch(
        SQL.scope_revisions, [s[0] for s in scopes], [s[1] for s in scopes], [s[2] for s in scopes]
    )
    return [row["revision"] for row in sorted(rows, key=lambda row: int(row["position"]))]


async def producer_job(tx: Transaction, version: UUID) -> UUID | None:
    row = await tx.fetchrow(SQL.producer_job, version)
    job_id: UUID | None = row["job_id"] if row else None
    return job_id
