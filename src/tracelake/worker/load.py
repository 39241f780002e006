"""How much a worker has in hand, and how much more it may take.

As many attempts run at once as there are operators. Claims run ahead of them only while tasks take milliseconds,
and then by no more than a tenth of a second's work: whoever claims more keeps it from other workers. What waits
longer than that after all is handed back. Sources run for ever and mostly wait, so they run beside the others and
take none of their places.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from uuid import UUID

from tracelake.worker.held_task import HeldTask

MAX_AHEAD = 64
_AHEAD_SECONDS = 0.1
_SHORT_SECONDS = 0.02
"""A task that takes longer gains nothing from being claimed early."""
_LONGEST_WAIT = 1.0
_MAX_UNREPORTED = 1000
_WEIGHT = 0.2


class Load:
    def __init__(self, concurrency: int, now: Callable[[], float] | None = None) -> None:
        self._concurrency = concurrency
        self._held: dict[UUID, HeldTask] = {}
        self._waiting: deque[tuple[float, HeldTask]] = deque()
        self._free: deque[asyncio.Future[HeldTask]] = deque()
        self._running: set[HeldTask] = set()
        self._beside: set[HeldTask] = set()
        self._mean: float | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._now = now or self._loop.time

    def get(self, task_id: UUID) -> HeldTask | None:
        return self._held.get(task_id)

    @property
    def held(self) -> list[HeldTask]:
        return list(self._held.values())

    @property
    def running(self) -> list[HeldTask]:
        return [*self._running, *self._beside]

    @property
    def room(self) -> int:
        """How many more may be claimed now."""
        if len(self._held) >= _MAX_UNREPORTED:
            return 0
        return max(0, self._concurrency + self._ahead - len(self._waiting) - len(self._running))

    @property
    def least_room(self) -> int:
        """While claims run ahead they come in batches: when half of what was claimed is used up."""
        return max(1, self._ahead // 2)

    @property
    def _ahead(self) -> int:
        if self._mean is None or self._mean > _SHORT_SECONDS:
            return 0
        return min(MAX_AHEAD, int(_AHEAD_SECONDS / max(self._mean, 1e-4)))

    async def changed(self, seconds: float) -> None:
        """Until something ends, or the time is over."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def add(self, held: HeldTask) -> None:
        self._held[held.task_id] = held
        while self._free:
            runner = self._free.popleft()
            if not runner.done():
                self._running.add(held)
                runner.set_result(held)
                return
        self._waiting.append((self._now(), held))

    def add_beside(self, held: HeldTask) -> None:
        """It runs already, in nobody's place; ``ran`` must follow."""
        self._held[held.task_id] = held
        self._beside.add(held)

    async def next(self) -> HeldTask:
        """The next attempt to run; ``ran`` must follow."""
        if self._waiting:
            _, held = self._waiting.popleft()
            self._running.add(held)
            return held
        turn: asyncio.Future[HeldTask] = self._loop.create_future()
        self._free.append(turn)
        return await turn

    def ran(self, held: HeldTask, seconds: float) -> None:
        if held in self._beside:
            self._beside.discard(held)
            self._changed.set()
            return
        self._running.discard(held)
        self._mean = seconds if self._mean is None else self._mean + _WEIGHT * (seconds - self._mean)
        self._changed.set()

    def reported(self, held: HeldTask) -> None:
        self._held.pop(held.task_id, None)
        self._changed.set()

    def take_overdue(self) -> list[HeldTask]:
        """What has waited too long, no longer waiting; and nothing more is claimed ahead for now."""
        if not self._waiting or self._now() - self._waiting[0][0] < _LONGEST_WAIT:
            return []
        self._mean = None
        return self.take_waiting()

    def take_waiting(self) -> list[HeldTask]:
        taken = [held for _, held in self._waiting]
        self._waiting.clear()
        return taken
