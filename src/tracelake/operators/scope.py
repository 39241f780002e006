"""The blocks that an attempt works on: a partition's, or those between two positions of a cursor."""

from __future__ import annotations

from dataclasses import dataclass

from tracelake.contracts.dispatcher_api import EventIn, PayloadInput, PayloadOutput, TaskPayload
from tracelake.domain.block_range import BlockRange


@dataclass(frozen=True, slots=True)
class Scope:
    """Both ends inclusive. ``by_cursor`` when they come from ``(after, upto]``, which may hold no block at all:
    then ``start`` is above ``end``."""

    start: int
    end: int
    by_cursor: bool = False

    @property
    def blocks(self) -> BlockRange | None:
        return BlockRange(self.start, self.end) if self.start <= self.end else None

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
        return Scope(read.after + 1, read.upto, by_cursor=True)
    return None


def scope_of_task(task: TaskPayload) -> Scope | None:
    """The scope of the first triggering input; a source has none."""
    read = next((read for read in task.inputs if read.trigger), None)
    return scope_of_input(read) if read is not None else None
