"""``noop``, ``range_splitter`` and ``range_aggregator``: operators that the Dispatcher runs in its own process.

``noop`` does nothing and announces its scope; workers can run it too. The other two are pure arithmetic over the
scope that the claim froze. Chunks and ranges lie on a grid, so a block is always in the same one, and repeated
requests make nothing twice. Only the ends of a request may cut a chunk, and one that meets an announced chunk there
becomes one with it: their partitions would overlap.

``range_aggregator`` announces a range once its last block is final by ``finality``: ``latest`` (the cursor
itself), a number of blocks behind the cursor, or ``finalized`` (the block that the source reports as final; a
source that reports none counts as final up to its cursor). After an invalidation it announces the ranges that it
touches again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from tracelake.contracts.dispatcher_api import EventIn, PayloadInput, PayloadOutput, TaskPayload
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.errors import Invalid
from tracelake.domain.events import MAX_TASK_EVENTS
from tracelake.domain.operators.in_process import (
    NOOP_SPEC,
    RANGE_AGGREGATOR,
    RANGE_SPLITTER,
    RangeAggregatorSettings,
)
from tracelake.operators.context import Context
from tracelake.operators.registry import operator
from tracelake.tables.scope import scope_of_request, scope_of_task


@operator(NOOP_SPEC.name)
def noop(ctx: Context) -> None:
    """Reports outputs with files or rows as empty; the event of an output without storage is implied."""
    if ctx.source is not None:
        ctx.emit(*announce_scope(ctx.task))
    for output in ctx.outputs:
        if output.storage != "none" and ctx.scope is not None and ctx.scope.blocks is not None:
            output.write_nothing()


def announce_scope(task: TaskPayload) -> Iterator[EventIn]:
    """One event per output, with the task's own scope."""
    scope = scope_of_task(task) or scope_of_request(task)
    if scope is None:
        return
    for output in task.outputs:
        event = scope.announced_by(output)
        if event is not None:
            yield event


def cells_cut(task: TaskPayload) -> list[BlockRange]:
    """The chunks of the grid of which the scope has only a part: its first and its last, or neither."""
    scope, size = _scope_to_split(task), RANGE_SPLITTER.read(task.config).chunk_size
    ends = {block - block % size for block in (scope.start, scope.end)}
    cells = [BlockRange(start, min(MAX_BLOCK, start + size - 1)) for start in sorted(ends)]
    return [cell for cell in cells if not scope.covers(cell)]


def split_range(
    task: TaskPayload, most: int = MAX_TASK_EVENTS, *, announced: Sequence[BlockRange] = ()
) -> Iterator[EventIn]:
    """``announced`` are the chunks that this job has announced in ``cells_cut``. Refused before the first event
    when there would be more than ``most``."""
    size = RANGE_SPLITTER.read(task.config).chunk_size
    [output] = task.outputs
    scope = _scope_to_split(task)
    # Counted instead of made: a small chunk_size may ask for more events than fit into memory.
    chunks = scope.end // size - scope.start // size + 1
    if chunks > most:
        raise Invalid(
            "TooManyChunks",
            f"blocks {scope.start:,} to {scope.end:,} are {chunks:,} chunks of {size:,} blocks, and one attempt "
            f"may announce {most:,}: ask for a smaller range, or set a larger chunk_size",
        )
    return _chunks(output, scope, size, announced)


def _scope_to_split(task: TaskPayload) -> BlockRange:
    scope = task.inputs[0]
    if not (isinstance(scope.start, int) and isinstance(scope.end, int)):
        raise Invalid("InvalidScope", "range_splitter needs a block range: run it PerPartition")
    return BlockRange(scope.start, scope.end)


def _chunks(
    output: PayloadOutput, scope: BlockRange, size: int, announced: Sequence[BlockRange]
) -> Iterator[EventIn]:
    for cut in scope.split_on_grid(size):
        chunk = cut if cut.end - cut.start + 1 == size else _joined(cut, announced)
        # What this request asks for belongs to a chunk that an earlier one has asked for.
        if chunk in announced and chunk != cut:
            continue
        yield EventIn(output.dataset_uuid, output.dataset_version, start=chunk.start, end=chunk.end)


def _joined(chunk: BlockRange, announced: Sequence[BlockRange]) -> BlockRange:
    """The chunk with those that it overlaps: its partition must cover theirs, or lie in none of them. All of them
    are of one cell of the grid, so it doesn't grow beyond that."""
    while True:
        met = [each for each in announced if each.overlaps(chunk)]
        whole = BlockRange(
            min([chunk.start, *(each.start for each in met)]), max([chunk.end, *(each.end for each in met)])
        )
        if whole == chunk:
            return chunk
        chunk = whole


def aggregate_ranges(
    task: TaskPayload, announced_upto: int | None, most: int = MAX_TASK_EVENTS
) -> Iterator[EventIn]:
    """``announced_upto`` is the last block of the last range that this job has announced. Refused before the first
    event when there would be more than ``most``."""
    config = RANGE_AGGREGATOR.read(task.config)
    size = config.range_size
    [output] = task.outputs
    read = task.inputs[0]
    final = _final(read, config.finality)
    start = _first_range(config, read, announced_upto)
    # Only whole ranges are announced, so the division rounds down.
    ranges = max(0, final - start + 1) // size
    if ranges > most:
        raise Invalid(
            "TooManyRanges",
            f"blocks {start:,} to {final:,} are {ranges:,} ranges of {size:,} blocks, and one attempt may announce "
            f"{most:,}: set a larger range_size, or a later start_block",
        )
    return _ranges(output, start, final, size)


def _ranges(output: PayloadOutput, start: int, final: int, size: int) -> Iterator[EventIn]:
    while start + size - 1 <= final:
        yield EventIn(output.dataset_uuid, output.dataset_version, start=start, end=start + size - 1)
        start += size


def _final(read: PayloadInput, finality: str | int) -> int:
    if not isinstance(read.upto, int):
        raise Invalid("InvalidScope", "range_aggregator needs a cursor: run it PerUpdate")
    match finality:
        case int(depth):
            return read.upto - depth
        case "finalized" if isinstance(read.finalized, int):
            return min(read.upto, read.finalized)
        case _:
            return read.upto


def _first_range(config: RangeAggregatorSettings, read: PayloadInput, announced_upto: int | None) -> int:
    size = config.range_size
    first = 0 if config.start_block is UNSET else config.start_block
    # The first multiple of the size that isn't below start_block.
    lowest = first + (-first % size)
    start = lowest if announced_upto is None else max(lowest, announced_upto + 1)
    if read.invalidation is not None:
        # From the range that the invalidation begins in, even if it was announced before.
        touched = read.invalidation.start - read.invalidation.start % size
        start = max(lowest, min(start, touched))
    return start + (-start % size)
