"""``noop``: does nothing, and says that its scope is done. For tests and benchmarks, on every runtime."""

from __future__ import annotations

from collections.abc import Iterator

from tracelake.contracts.dispatcher_api import EventIn, TaskPayload
from tracelake.operators.api import operator
from tracelake.operators.context import Context
from tracelake.operators.scope import scope_of_task


@operator("noop")
def noop(ctx: Context) -> None:
    """What an output with storage ``none`` announces is implied; one with files or rows is reported empty."""
    for output in ctx.outputs:
        if output.storage != "none" and ctx.scope is not None and ctx.scope.blocks is not None:
            output.write_nothing()


def run(task: TaskPayload) -> Iterator[EventIn]:
    """One event per output, with the scope that the task itself was given."""
    scope = scope_of_task(task)
    if scope is None:
        return
    for output in task.outputs:
        event = scope.announced_by(output)
        if event is not None:
            yield event
