"""``noop``: does nothing, and says that its scope is done. For tests and benchmarks, on every runtime."""

from __future__ import annotations

from collections.abc import Iterator

from tracelake.contracts.dispatcher_api import EventIn, TaskPayload


def run(task: TaskPayload) -> Iterator[EventIn]:
    """One event per output, with the scope that the task itself was given."""
    scope = next((read for read in task.inputs if read.trigger), None)
    if scope is None:
        return
    for output in task.outputs:
        ref = EventIn(dataset_uuid=output.dataset_uuid, dataset_version=output.dataset_version)
        if isinstance(scope.start, int) and isinstance(scope.end, int):
            yield EventIn(ref.dataset_uuid, ref.dataset_version, start=scope.start, end=scope.end)
        elif isinstance(scope.upto, int) and scope.upto >= 0:
            yield EventIn(ref.dataset_uuid, ref.dataset_version, cursor=scope.upto)
