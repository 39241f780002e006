"""Warm operator processes: one is ready before a task asks for it.

There are as many as tasks may run at once, and one to spare, since a process that isn't used again leaves a gap in
just the moment when the next task comes. A process that comes back is used again only if it said that it is as it
was before, has no child as far as the kernel knows, and hasn't served too many attempts. One that dies while it
waits is replaced, after a pause that grows when they die again and again. With its host the pool is at an end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

import structlog

from tracelake.contracts.operator_protocol import MAX_RUNS, SparkTarget
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.worker.host.client import OperatorHost, OperatorProcess

_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_READY_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class OperatorPool:
    def __init__(self, host: OperatorHost, size: int) -> None:
        self._host = host
        self._size = size
        self._idle: deque[OperatorProcess] = deque()
        self._taken: set[OperatorProcess] = set()
        self._waiting: deque[asyncio.Future[OperatorProcess]] = deque()
        self._tidying: set[asyncio.Task[None]] = set()
        self._gap = asyncio.Event()
        self._gap.set()
        self._closed: Unavailable | None = None
        self._keeper = asyncio.create_task(self._keep_warm())

    @property
    def warm(self) -> int:
        """How many are ready at once."""
        return len(self._idle)

    async def take(self) -> OperatorProcess:
        """Raises when there will be none: the host is gone, or its processes can't be started."""
        while True:
            if self._closed is not None:
                raise self._closed
            process = self._idle.pop() if self._idle else await self._next()
            # It may have died since it was found ready.
            if process.alive:
                self._taken.add(process)
                if not self._idle:
                    self._gap.set()
                return process

    async def give_back(self, process: OperatorProcess, *, reusable: bool) -> None:
        """One that isn't used again is gone when this returns, with everything that it left behind."""
        self._taken.remove(process)
        if reusable and process.alive and process.runs < MAX_RUNS and self._closed is None:
            if process.ready and process.children.any is False and len(self._idle) <= self._size:
                self._welcome(process)
                return
            tidying = asyncio.create_task(self._tidy(process))
            self._tidying.add(tidying)
            tidying.add_done_callback(self._tidying.discard)
            return
        self._gap.set()
        await process.kill()

    async def connect_to(self, spark: SparkTarget | None) -> None:
        """From now on processes connect to this Spark as they start; those that wait do it anew."""
        self._host.spark = spark
        self._gap.set()
        await self._kill_idle()

    async def close(self) -> None:
        """What was taken stays its taker's."""
        self._end(Unavailable("OperatorPoolClosed", "the worker is stopping"))
        self._keeper.cancel()
        await asyncio.gather(self._keeper, *self._tidying, return_exceptions=True)
        await self._kill_idle()

    async def _kill_idle(self) -> None:
        idle = list(self._idle)
        self._idle.clear()
        await asyncio.gather(*(process.kill() for process in idle))

    async def _next(self) -> OperatorProcess:
        self._gap.set()
        waiting: asyncio.Future[OperatorProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._welcome(waiting.result())
            raise

    async def _tidy(self, process: OperatorProcess) -> None:
        """It may be used again once it says so, and if that is true."""
        try:
            async with asyncio.timeout(_READY_SECONDS):
                if not process.ready:
                    await process.receive()
                clean = process.ready and await self._host.children(process) == 0
        except (TracelakeError, TimeoutError):
            clean = False
        if clean and self._closed is None and len(self._idle) <= self._size:
            self._welcome(process)
            return
        self._gap.set()
        await process.kill()

    def _welcome(self, process: OperatorProcess) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(process)
                return
        self._idle.append(process)

    def _forget(self, process: OperatorProcess) -> None:
        with suppress(ValueError):
            self._idle.remove(process)
            _log.warning("idle_operator_died", pid=process.pid)
            self._gap.set()

    def _lacking(self) -> bool:
        """As many as may be taken at once, and one ready while all are; and one for everybody who waits. Those that
        are tidied up come back."""
        alive = len(self._idle) + len(self._taken) + len(self._tidying)
        return alive <= self._size or len(self._waiting) > len(self._tidying)

    async def _keep_warm(self) -> None:
        died = asyncio.create_task(self._host.died())
        died.add_done_callback(lambda _: self._gap.set())
        pause = _PAUSE
        try:
            while not (died.done() or self._host.has_ended()):
                await self._gap.wait()
                self._gap.clear()
                while self._lacking() and not died.done():
                    try:
                        await self._add()
                        pause = _PAUSE
                    except TracelakeError as error:
                        if self._host.has_ended():
                            # What the process died of then isn't what those who wait need to hear.
                            break
                        _log.warning("operator_not_started", error=error.message, retry_in=pause)
                        self._disappoint(error)
                        await asyncio.sleep(pause)
                        pause = min(_LONGEST_PAUSE, pause * 2)
            self._end(Unavailable("OperatorHostGone", "the operator host has ended"))
        finally:
            died.cancel()

    async def _add(self) -> None:
        process = await self._host.spawn()
        process.hosted.gone.add_done_callback(lambda _: self._forget(process))
        self._welcome(process)

    def _disappoint(self, error: TracelakeError) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error)

    def _end(self, why: Unavailable) -> None:
        self._closed = self._closed or why
        self._disappoint(self._closed)
