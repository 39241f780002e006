"""``range_aggregator``: a rising cursor up to whole block ranges, as soon as they are final.

Pure arithmetic over what the claim froze: ranges are ``range_size`` long and start on multiples of it. A range
is announced once its last block is final by ``finality``: ``latest`` (the cursor itself), a number of blocks
behind the cursor, or ``finalized`` (what the source says can't be taken back; a source that says nothing about
finality is taken at its cursor). After an invalidation the ranges it touches are announced again.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracelake.contracts.dispatcher_api import EventIn, PayloadInput, PayloadOutput, TaskPayload
from tracelake.domain.errors import Invalid
from tracelake.domain.events import MAX_TASK_EVENTS


def run(task: TaskPayload, announced_upto: int | None, most: int = MAX_TASK_EVENTS) -> Iterator[EventIn]:
    """``announced_upto`` is the last block of the last range that this job has announced. Refused before the first
    event when there would be more than ``most``."""
    size = int(task.config["range_size"])
    [output] = task.outputs
    read = task.inputs[0]
    final = _final(read, task.config.get("finality", "finalized"))
    start = _first_range(task, read, announced_upto, size)
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


def _final(read: PayloadInput, finality: object) -> int:
    if not isinstance(read.upto, int):
        raise Invalid("InvalidScope", "range_aggregator needs a cursor: run it PerUpdate")
    match finality:
        case int(depth):
            return read.upto - depth
        case "finalized" if isinstance(read.finalized, int):
            return min(read.upto, read.finalized)
        case _:
            return read.upto


def _first_range(task: TaskPayload, read: PayloadInput, announced_upto: int | None, size: int) -> int:
    first = int(task.config.get("start_block", 0))
    lowest = first + (-first % size)
    start = lowest if announced_upto is None else max(lowest, announced_upto + 1)
    if read.invalidation is not None:
        touched = read.invalidation.start - read.invalidation.start % size
        start = max(lowest, min(start, touched))
    return start + (-start % size)
