"""Waiting out an outage: the same is tried again with growing pauses, and said once in the log and to people."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tracelake.domain.errors import Unavailable
from tracelake.worker.held_task import HeldTask

_PAUSES = (0.1, 5.0)

T = TypeVar("T")


class Patience:
    """``on_change`` is told what is being waited for, and None when that is over."""

    def __init__(self, held: HeldTask, on_change: Callable[[str | None], None]) -> None:
        self._held = held
        self._on_change = on_change
        self._away = False

    async def until_done(self, action: Callable[[], Awaitable[T]]) -> T:
        pause, longest = _PAUSES
        while True:
            try:
                done = await action()
            except Unavailable as error:
                if not self._away:
                    self._away = True
                    self._held.log.warning("sink_waits", reason=error.reason, error=error.message)
                    self._on_change(error.message)
            else:
                if self._away:
                    self._away = False
                    self._held.log.info("sink_goes_on")
                    self._on_change(None)
                return done
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(longest, pause * 2)
