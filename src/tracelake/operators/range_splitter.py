"""``range_splitter``: a block range down to chunks, cut on a grid.

Pure arithmetic: chunk boundaries are multiples of ``chunk_size``, so the same block is in the same chunk
whatever ranges were asked for, and asking twice makes nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracelake.contracts.dispatcher_api import EventIn, PayloadOutput, TaskPayload
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.domain.events import MAX_TASK_EVENTS

DEFAULT_CHUNK_SIZE = 1000


def run(task: TaskPayload, most: int = MAX_TASK_EVENTS) -> Iterator[EventIn]:
    """Refused before the first event when there would be more than ``most``."""
    size = task.config.get("chunk_size", DEFAULT_CHUNK_SIZE)
    [output] = task.outputs
    scope = task.inputs[0]
    if not (isinstance(scope.start, int) and isinstance(scope.end, int)):
        raise Invalid("InvalidScope", "range_splitter needs a block range: run it PerPartition")
    chunks = scope.end // size - scope.start // size + 1
    if chunks > most:
        raise Invalid(
            "TooManyChunks",
            f"blocks {scope.start:,} to {scope.end:,} are {chunks:,} chunks of {size:,} blocks, and one attempt "
            f"may announce {most:,}: ask for a smaller range, or set a larger chunk_size",
        )
    return _chunks(output, BlockRange(scope.start, scope.end), size)


def _chunks(output: PayloadOutput, scope: BlockRange, size: int) -> Iterator[EventIn]:
    for chunk in scope.split_on_grid(size):
        yield EventIn(output.dataset_uuid, output.dataset_version, start=chunk.start, end=chunk.end)
