"""Function environments that wait for another event: kept warm for a while, each for its own function only.

Busy ones belong to whoever took them. Idle ones are bounded in number, the one that was used longest ago going
first, and in time. One that has ended, or in which something went wrong, never comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tracelake.worker.lambda_.environment import Environment
from tracelake.worker.lambda_.function_program import FunctionIdentity

IDLE_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
_SOON_SECONDS = 0.1
"""About what a cold start takes: an environment that is nearly free is waited for that long."""

Start = Callable[[FunctionIdentity, int], Awaitable[Environment]]
StillGood = Callable[[FunctionIdentity], Awaitable[bool]]


class EnvironmentPool:
    """``start`` makes a new one whose output goes to a descriptor; ``still_good`` says whether what a function was
    started from is still what it was."""

    def __init__(
        self, start: Start, still_good: StillGood, *, max_idle: int, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._start = start
        self._still_good = still_good
        self._max_idle = max_idle
        self._idle_seconds = idle_seconds
        self._idle: list[tuple[float, Environment]] = []
        self._settling: dict[Environment, asyncio.Task[None]] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._reaper = asyncio.create_task(self._reap())

    async def take(self, function: FunctionIdentity, log_fd: int) -> Environment:
        """A warm one, the most recently used first, or a new one; its output goes to ``log_fd``."""
        settling = [task for environment, task in self._settling.items() if environment.function == function]
        if settling and not self._has_idle(function):
            await asyncio.wait(settling, timeout=_SOON_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        while self._has_idle(function):
            environment = self._pop_idle(function)
            if environment.usable and await self._still_good(function):
                environment.output.attach(log_fd)
                return environment
            self._discard(environment)
        return await self._start(function, log_fd)

    def give_back(self, environment: Environment) -> None:
        """It is idle once its runtime has asked for the next event, and left nothing behind."""
        environment.was_warm = True
        task = self._settling[environment] = self._do(self._settle(environment))
        task.add_done_callback(lambda _: self._settling.pop(environment, None))

    async def close(self) -> None:
        self._reaper.cancel()
        await asyncio.gather(self._reaper, return_exceptions=True)
        self._max_idle = 0
        while self._work or self._idle:
            for _, environment in self._idle:
                self._discard(environment)
            self._idle = []
            await asyncio.gather(*self._work, return_exceptions=True)

    def _has_idle(self, function: FunctionIdentity) -> bool:
        return any(environment.function == function for _, environment in self._idle)

    def _pop_idle(self, function: FunctionIdentity) -> Environment:
        index = max(n for n, (_, environment) in enumerate(self._idle) if environment.function == function)
        return self._idle.pop(index)[1]

    async def _settle(self, environment: Environment) -> None:
        if not await environment.waits_for_event(_SETTLE_SECONDS):
            await environment.close()
            return
        self._idle.append((asyncio.get_running_loop().time(), environment))
        environment.when_ended = lambda: self._ended(environment)
        while len(self._idle) > self._max_idle:
            self._discard(self._idle.pop(0)[1])

    def _ended(self, environment: Environment) -> None:
        """An idle environment that ends by itself is cleared away at once."""
        if any(entry is environment for _, entry in self._idle):
            self._idle = [pair for pair in self._idle if pair[1] is not environment]
            self._discard(environment)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._idle_seconds / 4)
            oldest = asyncio.get_running_loop().time() - self._idle_seconds
            stale = [environment for since, environment in self._idle if since < oldest]
            self._idle = [(since, environment) for since, environment in self._idle if since >= oldest]
            for environment in stale:
                self._discard(environment)

    def _discard(self, environment: Environment) -> None:
        self._do(environment.close())

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task
