"""Upstream events: an output of a dataset version, and the scope that the event is about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid

#: Default limits of one attempt; an installation may set others.
MAX_TASK_EVENTS = 1_000_000
MAX_TASK_RECORDS = 10_000_000
MAX_TASK_BYTES = 16 * 1024**3


class EventState(StrEnum):
    """Whether an event counts, is pending until its completion, waits until its source is released, or is only kept
    for audit."""

    COUNTED = "counted"
    PENDING = "pending"
    OLD_VERSION = "old_version"
    OLD_REVISION = "old_revision"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class CursorScope:
    """All blocks up to ``cursor``, inclusive. A reorg can't change blocks up to ``finalized`` any more."""

    cursor: int
    finalized: int | None = None

    kind = "cursor"

    @property
    def bounds(self) -> tuple[int, int]:
        return self.cursor, self.cursor


@dataclass(frozen=True, slots=True)
class PartitionScope:
    range: BlockRange

    kind = "partition"

    @property
    def bounds(self) -> tuple[int, int]:
        return self.range.start, self.range.end


@dataclass(frozen=True, slots=True)
class InvalidationScope:
    """``range`` is invalidated. ``id`` is the producer's, so that a repeated event has no second effect."""

    range: BlockRange
    id: str
    reason: str | None

    kind = "invalidation"

    @property
    def bounds(self) -> tuple[int, int]:
        return self.range.start, self.range.end


Scope = CursorScope | PartitionScope | InvalidationScope


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """A dataset by uuid, or by published name, which means its current version."""

    dataset_uuid: UUID | None
    dataset_version: UUID | None
    name: str | None

    @classmethod
    def of(cls, uuid: UUID | None, version: UUID | None, name: str | None) -> DatasetRef:
        if (uuid is None) == (name is None):
            raise Invalid("InvalidEvent", "name the dataset by either 'dataset_uuid' or 'dataset'")
        return cls(uuid, version, name)


@dataclass(frozen=True, slots=True)
class Event:
    """``revision`` is the one that the producer worked on, if it gives one."""

    dataset: DatasetRef
    scope: Scope
    revision: int | None = None


def partition_range(partition_key: str | None, start: int | None, end: int | None) -> BlockRange | None:
    """A range from its key, its ends, or both if they agree; None when nothing is given."""
    if partition_key is None and start is None and end is None:
        return None
    try:
        from_key = BlockRange.parse(partition_key) if partition_key is not None else None
        if start is None and end is None:
            return from_key
        if start is None or end is None:
            raise ValueError("'start' and 'end' go together")
        if start > end:
            raise ValueError(f"'start' {start} is above 'end' {end}")
        from_ends = BlockRange(start, end)
    except ValueError as error:
        raise Invalid("InvalidScope", str(error)) from None
    if from_key is not None and from_key != from_ends:
        raise Invalid("InvalidScope", f"partition_key {partition_key!r} is not {from_ends.partition_key!r}")
    return from_ends
