"""List inputs: the committed files that an attempt is to read, and no others.

What a reader gets is a list and never a folder, so it sees what was committed and nothing beside it. The files
are looked up before the inputs are checked: whatever was taken back before the look is found by the check, and
the attempt hears ``InputChanged`` instead of reading a list with a hole in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracelake.contracts.dispatcher_api import (
    MAX_INPUT_FILES,
    InputFile,
    PayloadInput,
    TaskInputsQuery,
    TaskInputsResponse,
)
from tracelake.dispatcher.steps import render_payload
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.dag.model import Storage
from tracelake.domain.errors import Conflict, Invalid, NotFound
from tracelake.domain.task import check_may_act
from tracelake.store import datasets, invalidations, tasks
from tracelake.store.db import DeployLock, Row, Transaction
from tracelake.store.invalidations import UsedScope
from tracelake.store.tasks import TaskRow


async def list_inputs(ctx: StepContext, query: TaskInputsQuery) -> TaskInputsResponse:
    async def work(tx: Transaction) -> TaskInputsResponse:
        task = await tasks.read(tx, query.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {query.task_id}")
        check_may_act(task.state, query.attempt, None)
        read = _find(task, query.input_index)
        span = scope_to_read(read)
        if read.storage != Storage.PARQUET.value or span is None:
            return TaskInputsResponse(read.storage, [])
        after = _place(query.after) if query.after else None
        rows = await datasets.committed_files(tx, read.dataset_version, span, after, MAX_INPUT_FILES + 1)
        await _check_unchanged(tx, task, read, span, after)
        return _page(read, rows)

    return await ctx.db.run(work, lock=DeployLock.NONE)


def scope_to_read(read: PayloadInput) -> BlockRange | None:
    """The blocks of an input that an attempt reads, as frozen at its claim; None when there are none.

    An update's input that doesn't trigger has no position of its own: all that is committed is read.
    """
    if isinstance(read.start, int) and isinstance(read.end, int):
        return BlockRange(read.start, read.end)
    if read.trigger and isinstance(read.after, int) and isinstance(read.upto, int):
        return BlockRange(read.after + 1, read.upto) if read.upto > read.after else None
    return BlockRange(0, MAX_BLOCK)


def _find(task: TaskRow, index: int) -> PayloadInput:
    for read in render_payload.from_json(task.inputs or []):
        if read.input_index == index:
            return read
    raise NotFound("UnknownInput", f"the task has no input {index}")


def _place(after: str) -> tuple[int, int]:
    partition, _, position = after.partition("-")
    return int(partition), int(position)


async def _check_unchanged(
    tx: Transaction, task: TaskRow, read: PayloadInput, span: BlockRange, after: tuple[int, int] | None
) -> None:
    """Nothing of what is read was taken back since the claim, and a list that goes on is still the same: a
    partition that replaces the one where it broke off would be cut in two."""
    used = UsedScope(task.task_id, read.dataset_version, read.revision, span.start, span.end)
    if await invalidations.changed_meanwhile(tx, [used]):
        raise Conflict("InputChanged", f"input {read.input_index} was invalidated since the claim")
    if after is None:
        return
    current = await datasets.is_current(tx, read.dataset_version, after[0])
    if current is None:
        raise Invalid("InvalidCursor", "'after' is not what a page gave as 'next'")
    if not current:
        raise Conflict("InputChanged", f"input {read.input_index} was replaced while it was listed")


def _page(read: PayloadInput, rows: Sequence[Row]) -> TaskInputsResponse:
    page = rows[:MAX_INPUT_FILES]
    last = page[-1] if len(rows) > len(page) else None
    return TaskInputsResponse(
        read.storage,
        [_file(row) for row in page],
        f"{last['partition_id']}-{last['position']}" if last else None,
    )


def _file(row: Row) -> InputFile:
    file = row["file"]
    return InputFile(
        location=file["location"],
        rows=file.get("rows"),
        bytes=file["bytes"],
        start=row["start"],
        end=row["end"],
        min_block=file.get("min_block"),
        max_block=file.get("max_block"),
    )
