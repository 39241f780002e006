"""``range_splitter``: a block range down to chunks, cut on a grid.

Pure arithmetic: chunk boundaries are multiples of ``chunk_size``, so the same block is in the same chunk
whatever ranges were asked for, and asking twice makes nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracelake.contracts.dispatcher_api import EventIn, TaskPayload
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid

DEFAULT_CHUNK_SIZE = 1000


def run(task: TaskPayload) -> Iterator[EventIn]:
    size = task.config.get("chunk_size", DEFAULT_CHUNK_SIZE)
    [output] = task.outputs
    scope = task.inputs[0]
    if not (isinstance(scope.start, int) and isinstance(scope.end, int)):
        raise Invalid("InvalidScope", "range_splitter needs a block range: run it PerPartition")
    for chunk in BlockRange(scope.start, scope.end).split_on_grid(size):
        yield EventIn(output.dataset_uuid, output.dataset_version, start=chunk.start, end=chunk.end)
