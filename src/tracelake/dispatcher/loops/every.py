"""A loop that does something every so often, says when it fails, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

import structlog

from tracelake.domain.errors import Unavailable

log = structlog.get_logger(__name__)


async def every(
    seconds: float,
    what: str,
    work: Callable[[], Awaitable[object]],
    *,
    nudge: asyncio.Event | None = None,
    on_error: Callable[[], None] | None = None,
    share: float = 1.0,
) -> None:
    """Run ``work`` for ever: at once, then every ``seconds`` or when ``nudge`` is set, whichever is first.

    ``share`` is how much of the time the work may take at most: longer work waits longer for its next turn.
    """
    nudge = nudge or asyncio.Event()
    while True:
        nudge.clear()
        began = monotonic()
        try:
            await work()
        except Unavailable as error:
            log.warning("loop waits for the database", loop=what, error=error.message)
            if on_error:
                on_error()
        except Exception:
            log.exception("loop failed", loop=what)
            if on_error:
                on_error()
        try:
            async with asyncio.timeout(max(seconds, (monotonic() - began) * (1 / share - 1))):
                await nudge.wait()
        except TimeoutError:
            pass
