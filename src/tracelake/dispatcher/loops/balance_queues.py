"""The loop of backpressure: looks at the queues soon after a commit of this process has changed them.

A look says how many new tasks, or claims, could change what it has found; until half as many were committed here,
no further one is needed. Commits of other replicas, and time, are noticed by looks without a cause, once a second.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

import structlog

from tracelake.dispatcher.steps.apply_backpressure import Balance, balance
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Unavailable

DISTANCE_SECONDS = 0.01
SHARE = 0.25
"""Of this process's time that looks may take: a large graph, or a slow database, is looked at less often."""
IDLE_SECONDS = 1.0

log = structlog.get_logger(__name__)


async def balance_queues(ctx: StepContext, every_seconds: float = IDLE_SECONDS) -> None:
    """Run for ever."""
    while True:
        # Before the look: a change that comes during it may not be seen by it.
        ctx.queues.looking()
        began = monotonic()
        found = await _look(ctx)
        took = monotonic() - began
        ctx.queues.looked(found.until_full, found.until_empty)
        # A change takes long, since it waits for others, and is no reason to be late for the next one.
        await asyncio.sleep(max(DISTANCE_SECONDS, took * (1 / SHARE - 1) if not found.changed else 0))
        if found.more:
            continue
        wait = every_seconds if found.look_again is None else min(every_seconds, found.look_again)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await ctx.queues.due.wait()


async def _look(ctx: StepContext) -> Balance:
    try:
        return await balance(ctx)
    except Unavailable as error:
        log.warning("loop waits for the database", loop="backpressure", error=error.message)
    except Exception:
        log.exception("loop failed", loop="backpressure")
    # Tried again after the longest wait.
    return Balance()
