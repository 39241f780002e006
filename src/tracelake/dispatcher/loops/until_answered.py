"""A step of this process's own that is asked again when an outage of the database swallowed its answer, as any
worker would: a lost answer must not cost a lease period."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tracelake.domain.errors import Unavailable

PATIENCE_SECONDS = 30.0
_PAUSES = (0.1, 2.0)

T = TypeVar("T")


async def until_answered(call: Callable[[], Awaitable[T]], *, stopping: Callable[[], bool]) -> T:
    """Raises ``Unavailable`` when patience is over, or at the first one while the process is stopping."""
    loop = asyncio.get_running_loop()
    pause, longest = _PAUSES
    patience = loop.time() + PATIENCE_SECONDS
    while True:
        try:
            return await call()
        except Unavailable:
            if stopping() or loop.time() > patience:
                raise
        await asyncio.sleep(pause)
        pause = min(longest, pause * 2)
