"""Dataset versions, their cursors, partitions and events, and the positions of their consumers.

Cursors only rise here and partitions only replace what they cover; going back is for ``invalidations``. Every event
is recorded once, whether it counts or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from tracelake.contracts.manifest import ChainEdges
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, Storage
from tracelake.domain.events import EventState
from tracelake.postgres import sqlfiles
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "datasets.sql")


@dataclass(frozen=True, slots=True)
class Version:
    dataset_version: UUID
    dataset_uuid: UUID
    version_no: int
    job_id: UUID | None
    storage: Storage
    revision: int
    is_current: bool


@dataclass(frozen=True, slots=True)
class NamedVersion:
    version: Version
    dag_name: str
    job_name: str | None


@dataclass(frozen=True, slots=True)
class Consumer:
    """A triggering input of an active job."""

    dataset_version: UUID
    job_id: UUID
    input_index: int
    strategy: ExecutionStrategy
    trigger_count: int

    @property
    def gated(self) -> bool:
        """Whether routing must lock the job's row. For merged tasks and joins it must: of two events that come at
        once, each would miss the other's half."""
        return self.strategy is ExecutionStrategy.PER_UPDATE or self.trigger_count > 1


@dataclass(frozen=True, slots=True)
class CommittedScope:
    """A scope that this transaction commits. ``changed`` is false for a repeat."""

    dataset_version: UUID
    range: BlockRange
    changed: bool


@dataclass(frozen=True, slots=True)
class Announcement:
    version: Version
    range: BlockRange
    task_id: UUID | None
    attempt: int | None
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class StoredPartition:
    version: Version
    range: BlockRange
    task_id: UUID
    attempt: int
    epoch: int
    location: str | None
    manifest: Any
    row_count: int | None
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class CursorAdvance:
    dataset_version: UUID
    cursor: int
    finalized: int | None


@dataclass(frozen=True, slots=True)
class ConsumerPosition:
    cursor: int
    inv_revision: int | None


@dataclass(frozen=True, slots=True)
class UpdateRead:
    """The range of a partitioned version that an update read: ``(after, upto]``, as of the last partition at its
    claim."""

    task_id: UUID
    dataset_version: UUID
    after: int
    upto: int
    as_of: int


async def share_versions(tx: Transaction, versions: Iterable[UUID]) -> dict[UUID, Version]:
    """Lock versions against invalidation until the transaction ends; any number may share them."""
    return _versions(await tx.fetch(SQL.share_versions, sorted(set(versions))))


async def hold_versions(tx: Transaction, versions: Iterable[UUID]) -> dict[UUID, Version]:
    """Lock versions like ``share_versions``, and against others that hold them."""
    return _versions(await tx.fetch(SQL.hold_versions, sorted(set(versions))))


async def own_versions(tx: Transaction, versions: Iterable[UUID]) -> dict[UUID, Version]:
    return _versions(await tx.fetch(SQL.own_versions, sorted(set(versions))))


async def versions_by_id(tx: Transaction, versions: Iterable[UUID]) -> dict[UUID, NamedVersion]:
    rows = await tx.fetch(SQL.versions_by_id, list(set(versions)))
    return {
        row["dataset_version"]: NamedVersion(_version(row), row["dag_name"], row["job_name"]) for row in rows
    }


async def by_name(tx: Transaction, org_id: UUID, names: Iterable[str]) -> dict[str, UUID]:
    rows = await tx.fetch(SQL.datasets_by_name, org_id, list(set(names)))
    return {row["published_name"]: row["dataset_uuid"] for row in rows}


async def cursor_of(tx: Transaction, dataset_version: UUID) -> int | None:
    row = await tx.fetchrow(SQL.cursor_of, dataset_version)
    return None if row is None else row["cursor"]


async def advance_cursors(tx: Transaction, advances: Sequence[CursorAdvance]) -> dict[UUID, int]:
    """Raise cursors; returns the versions whose cursor or finality moved, with their cursor before."""
    if not advances:
        return {}
    rows = await tx.fetch(
        SQL.advance_cursors,
        [advance.dataset_version for advance in advances],
        [advance.cursor for advance in advances],
        [advance.finalized for advance in advances],
    )
    return {row["dataset_version"]: row["before"] for row in rows}


async def announce_scopes(tx: Transaction, scopes: Sequence[Announcement]) -> list[CommittedScope]:
    """Count scopes of datasets without storage."""
    if not scopes:
        return []
    rows = await tx.fetch(
        SQL.announce_scopes,
        [scope.version.dataset_version for scope in scopes],
        [scope.version.version_no for scope in scopes],
        [scope.range.start for scope in scopes],
        [scope.range.end for scope in scopes],
        [scope.task_id for scope in scopes],
        [scope.attempt for scope in scopes],
        [scope.bulk for scope in scopes],
    )
    new = {(row["dataset_version"], row["range_start"], row["range_end"]) for row in rows}
    return [
        CommittedScope(
            scope.version.dataset_version,
            scope.range,
            (scope.version.dataset_version, scope.range.start, scope.range.end) in new,
        )
        for scope in scopes
    ]


async def not_covered(
    tx: Transaction, partitions: Sequence[StoredPartition]
) -> list[tuple[UUID, BlockRange]]:
    """Current partitions that the given ones touch without covering them."""
    rows = await tx.fetch(SQL.overlapping_partitions, *_ranges(partitions))
    return [(row["dataset_version"], BlockRange(row["range_start"], row["range_end"])) for row in rows]


async def neighbours(
    tx: Transaction, partitions: Sequence[tuple[UUID, BlockRange]]
) -> list[list[tuple[BlockRange, ChainEdges]]]:
    """For each partition, the current ones right before and right after it whose edges are known."""
    rows = await tx.fetch(
        SQL.neighbours,
        [version for version, _ in partitions],
        [span.start for _, span in partitions],
        [span.end for _, span in partitions],
    )
    found: list[list[tuple[BlockRange, ChainEdges]]] = [[] for _ in partitions]
    for row in rows:
        span = BlockRange(row["range_start"], row["range_end"])
        found[row["position"] - 1].append((span, msgspec.convert(row["edges"], ChainEdges)))
    return found


async def commit_partitions(tx: Transaction, partitions: Sequence[StoredPartition]) -> list[CommittedScope]:
    """Make these the current partitions of their ranges; partitions that they cover are no longer current."""
    if not partitions:
        return []
    # First, or the unique index of current partitions would refuse the same range again.
    await tx.execute(SQL.supersede_partitions, *_ranges(partitions))
    await tx.fetch(
        SQL.commit_partitions,
        [partition.version.dataset_version for partition in partitions],
        *_ranges(partitions),
        [partition.task_id for partition in partitions],
        [partition.attempt for partition in partitions],
        [partition.epoch for partition in partitions],
        [partition.location for partition in partitions],
        [partition.manifest for partition in partitions],
        [partition.row_count for partition in partitions],
        [partition.bulk for partition in partitions],
    )
    return [
        CommittedScope(partition.version.dataset_version, partition.range, True) for partition in partitions
    ]


async def consumers(tx: Transaction, versions: Iterable[UUID]) -> list[Consumer]:
    rows = await tx.fetch(SQL.consumers, list(set(versions)))
    return [
        Consumer(
            row["dataset_version"],
            row["job_id"],
            row["input_index"],
            ExecutionStrategy(row["execution_strategy"]),
            row["trigger_count"],
        )
        for row in rows
    ]


async def scopes_reached_by_cursor(
    tx: Transaction, joins: Sequence[tuple[UUID, UUID, int, int]]
) -> list[tuple[UUID, BlockRange]]:
    """Scopes of a join's other inputs that ``(job, version, before, cursor)`` covers and didn't before."""
    if not joins:
        return []
    rows = await tx.fetch(
        SQL.scopes_reached_by_cursor,
        [j[0] for j in joins],
        [j[1] for j in joins],
        [j[2] for j in joins],
        [j[3] for j in joins],
    )
    return [(row["job_id"], BlockRange(row["range_start"], row["range_end"])) for row in rows]


async def rewind_below_commit(tx: Transaction, commits: Sequence[tuple[UUID, int, int]]) -> None:
    """``(job, input, start)`` each: the job must read from ``start`` again if it is already beyond."""
    if commits:
        await tx.execute(
            SQL.rewind_below_commit, [c[0] for c in commits], [c[1] for c in commits], [c[2] for c in commits]
        )


async def positions(tx: Transaction, job_ids: Iterable[UUID]) -> dict[tuple[UUID, int], ConsumerPosition]:
    rows = await tx.fetch(SQL.read_consumers, list(set(job_ids)))
    return {
        (row["job_id"], row["input_index"]): ConsumerPosition(row["cursor"], row["inv_revision"])
        for row in rows
    }


async def filled_in_since(tx: Transaction, reads: Sequence[UpdateRead]) -> set[UUID]:
    """The tasks of ``reads`` whose range got another partition since their claim; their jobs' gates are held."""
    if not reads:
        return set()
    rows = await tx.fetch(
        SQL.filled_in_since,
        [read.task_id for read in reads],
        [read.dataset_version for read in reads],
        [read.after for read in reads],
        [read.upto for read in reads],
        [read.as_of for read in reads],
    )
    return {row["task_id"] for row in rows}


async def advance_consumers(tx: Transaction, moves: Sequence[tuple[UUID, int, int]]) -> None:
    """``(job, input, upto)`` each; the caller compared the old position under the job's gate."""
    if moves:
        await tx.execute(
            SQL.advance_consumers, [m[0] for m in moves], [m[1] for m in moves], [m[2] for m in moves]
        )


async def committed_files(
    tx: Transaction, version: UUID, span: BlockRange, after: tuple[int, int] | None, limit: int
) -> list[Row]:
    """A page of files; ``after`` is the partition, and the file in it, at which the last page ended."""
    partition, position = after or (None, None)
    return await tx.fetch(SQL.committed_files, version, span.start, span.end, partition, position, limit)


async def is_current(tx: Transaction, version: UUID, partition_id: int) -> bool | None:
    """Whether a partition is still current; None when the version never had it."""
    row = await tx.fetchrow(SQL.is_current, partition_id, version)
    return row["current"] if row else None


async def announced_within(tx: Transaction, version: UUID, spans: Sequence[BlockRange]) -> list[BlockRange]:
    """Current scopes of a version that begin within any of these ranges."""
    if not spans:
        return []
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    rows = await tx.fetch(SQL.announced_within, version, starts, ends)
    return [BlockRange(row["range_start"], row["range_end"]) for row in rows]


async def last_announced(tx: Transaction, version: UUID) -> int | None:
    row = await tx.fetchrow(SQL.last_announced, version)
    return row["range_end"] if row else None


def _ranges(partitions: Sequence[StoredPartition]) -> tuple[list[int], list[int], list[int]]:
    return (
        [partition.version.version_no for partition in partitions],
        [partition.range.start for partition in partitions],
        [partition.range.end for partition in partitions],
    )


def _versions(rows: Sequence[Row]) -> dict[UUID, Version]:
    return {row["dataset_version"]: _version(row) for row in rows}


def _version(row: Row) -> Version:
    return Version(
        row["dataset_version"],
        row["dataset_uuid"],
        row["version_no"],
        row["job_id"],
        Storage(row["storage"]),
        row["revision"],
        row["is_current"],
    )


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
    bulk: bool = False

    @property
    def key(self) -> tuple[UUID, UUID | None, str, int, int]:
        return self.dataset_version, self.task_id, self.kind, *self.bounds


async def count_events_of_attempt(tx: Transaction, task_id: UUID, attempt: int, most: int) -> int:
    rows = await tx.fetch(SQL.count_of_attempt, task_id, attempt, most)
    count: int = rows[0][0]
    return count


async def record_events(tx: Transaction, events: Sequence[EventRow]) -> list[int]:
    """Record the events; returns their ids in the order given."""
    if not events:
        return []
    # Postgres refuses an ON CONFLICT DO UPDATE that meets the same row twice in one statement.
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
        [event.bulk for event in unique],
    )
    ids = {
        (row["dataset_version"], row["task_id"], row["kind"], row["range_start"], row["range_end"]): row[
            "event_id"
        ]
        for row in rows
    }
    return [ids[event.key] for event in events]
