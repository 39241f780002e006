"""What goes on in the background for as long as a worker does: whoever watches the host, Spark, pools and logs.

Each of them goes on whatever happens to it, and says so in the log. One that ends all the same takes its worker
along, which is then started anew: a worker that nobody watches over would claim tasks that it can't run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

from tracelake.domain.errors import Unavailable

_log = structlog.get_logger(__name__)


class Background:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def running(self, what: str, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = what
        task.add_done_callback(self._note)
        try:
            yield
        finally:
            task.remove_done_callback(self._note)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def ended(self) -> None:
        """Returns when one of them has."""
        await self._ended.wait()

    def check(self) -> None:
        """Raises for one that has ended, while all should be going on."""
        for task, what in self._tasks.items():
            if task.done():
                error = None if task.cancelled() else task.exception()
                why = f": {type(error).__name__}: {error}" if error is not None else ""
                raise Unavailable("WorkerBroken", f"{what} has ended{why}; the worker has to be started anew")

    def _note(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        _log.error("background_work_ended", what=self._tasks[task], exc_info=error)
        self._ended.set()
