"""The blocks that an attempt works on: a partition's, or those between two positions of a cursor."""

from __future__ import annotations

from dataclasses import dataclass

from tracelake.contracts.dispatcher_api import EventIn, PayloadInput, PayloadOutput, TaskPayload
from tracelake.domain.block_range import BlockRange


@dataclass(frozen=True, slots=True)
class Scope:
    """Both ends inclusive. ``by_cursor`` when they come from ``(after, upto]``, which may hold no block at all:
    then ``start`` is above ``end``. ``taken_back_upto`` is the last block that an invalidation took back, which may
    be beyond the end: a chain can get shorter."""

    start: int
    end: int
    by_cursor: bool = False
    taken_back_upto: int = -1

    @property
    def blocks(self) -> BlockRange | None:
        return BlockRange(self.start, self.end) if self.start <= self.end else None

    @property
    def replaced(self) -> BlockRange | None:
        """The blocks of which nothing earlier may stay: those of the scope, and those that are gone."""
        end = max(self.end, self.taken_back_upto)
        return BlockRange(self.start, end) if self.start <= end else None

    def announced_by(self, output: PayloadOutput) -> EventIn | None:
        """The event that says that an output is done with this scope."""
        if not self.by_cursor:
            return EventIn(output.dataset_uuid, output.dataset_version, start=self.start, end=self.end)
        if self.end < 0:
            return None
        return EventIn(output.dataset_uuid, output.dataset_version, cursor=self.end)


def scope_of_input(read: PayloadInput) -> Scope | None:
    """What of an input is to be read; None means all that is committed."""
    if isinstance(read.start, int) and isinstance(read.end, int):
        return Scope(read.start, read.end)
    if read.trigger and isinstance(read.after, int) and isinstance(read.upto, int):
        gone = read.invalidation.end if read.invalidation is not None else -1
        return Scope(read.after + 1, read.upto, by_cursor=True, taken_back_upto=gone)
    return None


def scope_of_task(task: TaskPayload) -> Scope | None:
    """The scope of the first triggering input; a source has none."""
    read = next((read for read in task.inputs if read.trigger), None)
    return scope_of_input(read) if read is not None else None
