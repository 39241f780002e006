"""A real operator between the real steps of the Dispatcher: claimed, run in a thread of the test, completed.

What stands in for a worker is a few lines: calls go to the steps directly, under the attempt's fence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from tracelake.contracts.dispatcher_api import InputFile, TaskInputsQuery
from tracelake.contracts.operator_protocol import Action, EmitEvents, ListFiles
from tracelake.dispatcher.steps.list_inputs import list_inputs
from tracelake.operators.context import Context
from tracelake.operators.registry import Registry
from tracelake.testing.conversation import Conversation, Lease

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


class StepLink:
    """An operator's line to the steps, from another thread than theirs."""

    canceled = paused = False

    def __init__(self, talk: Conversation, lease: Lease, spark: SparkSession | None) -> None:
        self._talk = talk
        self._lease = lease
        self._spark = spark
        self._loop = asyncio.get_running_loop()

    def call(self, action: Action) -> Any:
        match action:
            case ListFiles(index):
                return msgspec.to_builtins(self._wait(self._list(index)))
            case EmitEvents(events):
                return msgspec.to_builtins(self._wait(self._talk.emit(self._lease, *events)))
            case _:
                raise AssertionError(action)

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> SparkSession:
        assert self._spark is not None
        return self._spark

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _list(self, index: int) -> list[InputFile]:
        files: list[InputFile] = []
        after: str | None = None
        while True:
            query = TaskInputsQuery(self._lease.task_id, self._lease.attempt, index, after or UNSET)
            page = await list_inputs(self._talk.ctx, query)
            files += page.files
            if page.next is None:
                return files
            after = page.next


async def run_operator(
    talk: Conversation, job: str, spark: SparkSession | None = None, **fields: Any
) -> Lease:
    """Claim the only queued task of a job, run its operator and complete it; what it raises is raised here, with
    the attempt still running. ``fields`` are what a worker gives a context."""
    lease = await talk.lease(job)
    ctx = Context(lease.payload, StepLink(talk, lease, spark), **fields)
    try:
        await asyncio.to_thread(Registry.standard().get(lease.payload.operator), ctx)
        outputs, events = await asyncio.to_thread(ctx.finish)
    finally:
        ctx.close()
    await talk.complete(lease, *outputs, events=events)
    return lease
