"""Heartbeats for every task that the worker holds, running or waiting for its turn.

Each goes out a quarter of the lease after the last one was answered, and earlier when an operator has progress to
tell. One timer serves them all, so a task that is done before its first heartbeat costs an entry in a table. A
Dispatcher that can't be reached is tried again until the task is let go.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from tracelake.contracts.dispatcher_api import HeartbeatRequest, HeartbeatResponse
from tracelake.domain.errors import Conflict, NotFound, TracelakeError
from tracelake.worker.held_task import HeldTask, Stop

PROGRESS_SECONDS = 2.0
_SHORTEST_TRY = 1.0


class Heartbeats:
    def __init__(self, send: Callable[[HeartbeatRequest, float], Awaitable[HeartbeatResponse]]) -> None:
        """``send`` repeats until it is answered; its second argument bounds a single try."""
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._due: dict[HeldTask, float] = {}
        self._last: dict[HeldTask, float] = {}
        self._beating: dict[HeldTask, asyncio.Task[None]] = {}
        self._saying: set[HeldTask] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def keep(self, held: HeldTask) -> None:
        self._schedule(held, self._loop.time() + held.heartbeat_seconds)

    def let_go(self, held: HeldTask) -> None:
        self._due.pop(held, None)
        self._last.pop(held, None)
        self._saying.discard(held)
        beat = self._beating.pop(held, None)
        if beat is not None:
            beat.cancel()

    def hurry(self, held: HeldTask) -> None:
        """There is progress to tell; what comes within a moment goes together."""
        due = self._due.get(held)
        if due is not None:
            soon = max(self._loop.time(), self._last.get(held, -math.inf) + PROGRESS_SECONDS)
            if soon < due:
                self._schedule(held, soon)

    def has_unsaid(self, held: HeldTask) -> bool:
        """Progress that was reported and not yet heard by the Dispatcher."""
        return held.has_progress or held in self._saying

    async def flush(self, held: HeldTask) -> None:
        """The last progress of a task that ends, if it wasn't told yet; an unanswered one is no matter."""
        # One may be on its way already, with progress that is no longer the last.
        for _ in range(2):
            beat = self._beating.get(held)
            if beat is None and held.has_progress and self._due.pop(held, None) is not None:
                beat = self._begin(held)
            if beat is None:
                return
            await asyncio.wait([beat], timeout=_SHORTEST_TRY)

    def close(self) -> None:
        for held in tuple(self._due) + tuple(self._beating):
            self.let_go(held)
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, held: HeldTask, due: float) -> None:
        self._due[held] = due
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._loop.time()
        earliest = math.inf
        for held, due in tuple(self._due.items()):
            if due <= now:
                del self._due[held]
                self._begin(held)
            else:
                earliest = min(earliest, due)
        if earliest < self._timer_at:
            self._timer_at = earliest
            self._timer = self._loop.call_at(earliest, self._fire)

    def _begin(self, held: HeldTask) -> asyncio.Task[None]:
        if held.has_progress:
            self._saying.add(held)
        beat = asyncio.create_task(self._beat(held))
        self._beating[held] = beat
        return beat

    async def _beat(self, held: HeldTask) -> None:
        try:
            held.heard(await self._send(held.heartbeat(), max(_SHORTEST_TRY, held.heartbeat_seconds)))
        except (Conflict, NotFound) as refusal:
            if not held.reported:
                held.log.warning("attempt_superseded", reason=refusal.reason)
                held.stop(Stop.SUPERSEDED)
        except TracelakeError as refusal:
            held.log.error("heartbeat_refused", reason=refusal.reason, error=refusal.message)
        self._saying.discard(held)
        if self._beating.pop(held, None) is not None:
            self._last[held] = self._loop.time()
            self._schedule(held, self._last[held] + held.heartbeat_seconds)
            if held.has_progress:
                self.hurry(held)
