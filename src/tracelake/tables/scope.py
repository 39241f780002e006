"""``ReadScope``, the blocks of an attempt, and ``ReadRequest``, the rows that a reader of tables is to read.

A scope is the blocks that an attempt works on: those of a partition, or those between two positions of a cursor. A
``ReadRequest`` is all that a reader knows of an input, so that tables can be read without operators and tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from tracelake.contracts.dispatcher_api import (
    EventIn,
    InputFile,
    PayloadInput,
    PayloadOutput,
    TaskPayload,
)
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.tables.data_database import DataDatabase

if TYPE_CHECKING:
    from tracelake.domain.where import Predicate

BLOCK_COLUMN = "block_number"


@dataclass(frozen=True, slots=True)
class ReadScope:
    """Both ends inclusive. ``by_cursor`` when they come from ``(after, upto]``, which may hold no block at all:
    then ``start`` is above ``end``. ``invalidated_upto`` is the last block of an invalidation, which may be beyond
    the end: a chain can get shorter."""

    start: int
    end: int
    by_cursor: bool = False
    invalidated_upto: int = -1

    @property
    def blocks(self) -> BlockRange | None:
        return BlockRange(self.start, self.end) if self.start <= self.end else None

    @property
    def replaced(self) -> BlockRange | None:
        """The blocks whose earlier rows must go: those of the scope, and those that were invalidated beyond it."""
        end = max(self.end, self.invalidated_upto)
        return BlockRange(self.start, end) if self.start <= end else None

    def announced_by(self, output: PayloadOutput) -> EventIn | None:
        """The event that announces this scope of an output as done."""
        if not self.by_cursor:
            return EventIn(output.dataset_uuid, output.dataset_version, start=self.start, end=self.end)
        if self.end < 0:
            return None
        return EventIn(output.dataset_uuid, output.dataset_version, cursor=self.end)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Committed rows to read: of files, of hot rows in ``data``, or of both.

    ``scope`` None reads everything, ``predicate`` None every row. ``cut_by`` is the column that the scope is a
    range of. ``files`` lists the committed files when it is called: readers of hot and cold rows take their
    snapshot first."""

    name: str
    dataset_version: UUID
    scope: ReadScope | None
    predicate: Predicate | None
    cut_by: str
    data: DataDatabase
    files: Callable[[], list[InputFile]]


def check_cut(files: list[InputFile], scope: ReadScope | None, name: str) -> None:
    """Rows without a block number can't be cut: then every file must lie within the scope."""
    for file in files:
        if scope is not None and not (scope.start <= file.start and file.end <= scope.end):
            raise Invalid(
                "InputNotCut",
                f"input {name!r} has no column {BLOCK_COLUMN}, and a partition {file.start}-{file.end} "
                f"that reaches beyond {scope.start}-{scope.end}",
            )


def scope_of_input(read: PayloadInput) -> ReadScope | None:
    """The blocks to read of an input; None for everything that is committed."""
    if isinstance(read.start, int) and isinstance(read.end, int):
        return ReadScope(read.start, read.end)
    if read.trigger and isinstance(read.after, int) and isinstance(read.upto, int):
        gone = read.invalidation.end if read.invalidation is not None else -1
        return ReadScope(read.after + 1, read.upto, by_cursor=True, invalidated_upto=gone)
    return None


def scope_of_task(task: TaskPayload) -> ReadScope | None:
    """The scope of the first triggering input; a source has none."""
    read = next((read for read in task.inputs if read.trigger), None)
    return scope_of_input(read) if read is not None else None


def scope_of_request(task: TaskPayload) -> ReadScope | None:
    """What a source's task is for, as a scope: a no-op announces it, other code sends events of its own."""
    source = task.source
    if source is None:
        return None
    if source.tick is not None:
        return ReadScope(0, source.tick, by_cursor=True)
    if source.delivery is not None:
        return ReadScope(0, source.delivery.number, by_cursor=True)
    if source.request is not None:
        asked = source.request
        if asked.start is not None and asked.end is not None:
            return ReadScope(asked.start, asked.end)
        return ReadScope(0, asked.number if asked.cursor is None else asked.cursor, by_cursor=True)
    return None
