"""What a task is about, as rows that it publishes say it: its blocks, and how often they were taken back.

A revision only ever rises for one job: to where its generation begins it adds the revisions of all that the job
reads and writes, each of which counts invalidations. So a row that is published again after any of them, or by the
next generation, replaces the one from before.
"""

from __future__ import annotations

from collections.abc import Iterable

from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.dispatcher.steps import render_payload
from tracelake.domain.block_range import BlockRange
from tracelake.store.tasks import TaskRow


def scope_of(task: TaskRow) -> BlockRange | None:
    """The task's blocks: its partition, or all that it reads of triggering inputs that have blocks. An update that
    has nothing new to read is about what was taken back."""
    if task.scope is not None:
        return task.scope
    reads = _by_block(task)
    return _hull(map(_window, reads)) or _hull(map(_taken_back, reads))


def remade(task: TaskRow) -> BlockRange | None:
    """The blocks that this task did again because they were taken back; None when it didn't run because of that.
    An update did what it read of every input of which something was taken back."""
    if task.scope is not None:
        again = any(read["trigger"] and read["invalidation"] for read in task.inputs or ())
        return task.scope if again else None
    reads = [read for read in _by_block(task) if read.invalidation]
    return _hull([*map(_window, reads), *map(_taken_back, reads)])


def revision_of(task: TaskRow, base: int) -> int:
    """``base`` is where the revisions of the job's generation begin."""
    reads = render_payload.from_json(task.inputs or [])
    return base + sum(read.revision for read in reads) + sum((task.output_revisions or {}).values())


def _by_block(task: TaskRow) -> list[PayloadInput]:
    reads = render_payload.from_json(task.inputs or [])
    return [read for read in reads if read.trigger and read.cursor_column is None]


def _hull(spans: Iterable[BlockRange | None]) -> BlockRange | None:
    found = [span for span in spans if span is not None]
    if not found:
        return None
    return BlockRange(min(span.start for span in found), max(span.end for span in found))


def _window(read: PayloadInput) -> BlockRange | None:
    if not isinstance(read.after, int) or not isinstance(read.upto, int) or read.upto <= read.after:
        return None
    return BlockRange(max(0, read.after + 1), read.upto)


def _taken_back(read: PayloadInput) -> BlockRange | None:
    return BlockRange(read.invalidation.start, read.invalidation.end) if read.invalidation else None
