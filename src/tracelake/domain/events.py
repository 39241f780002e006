"""Upstream events: an output of a dataset version, and the scope that it now has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid

MAX_TASK_EVENTS = 1_000_000
MAX_TASK_RECORDS = 10_000_000
MAX_TASK_BYTES = 16 * 1024**3
"""What one attempt may emit, where the installation doesn't say otherwise."""


class EventState(StrEnum):
    """What an event means: it counts, it waits for its completion, or it is only kept for audit."""

    COUNTED = "counted"
    PENDING = "pending"
    OLD_VERSION = "old_version"
    OLD_REVISION = "old_revision"


@dataclass(frozen=True, slots=True)
class CursorScope:
    """Everything up to ``cursor``, inclusive. ``finalized`` is what the chain can't take back any more."""

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
    """``range`` is taken back. ``id`` is the producer's, so that saying it twice is saying it once."""

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
    """A dataset as a caller named it: by uuid, or by published name (then the current version is meant)."""

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
    """``revision`` is the one that the producer worked on, when it says so."""

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
