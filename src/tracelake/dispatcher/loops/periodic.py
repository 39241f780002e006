"""Loops that run by the clock: each runs by ``every``, which logs a failure and goes on.

They sweep the outbox, reap leases that ran out, wake queued tasks again, reconcile partitions, restart always-on
sources, route what released sources have kept, remove what is no longer needed, and observe the state for metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from tracelake.dispatcher.loops.balance_queues import balance_queues
from tracelake.dispatcher.loops.deliver_outbox import OutboxDelivery
from tracelake.dispatcher.metrics import ChainGauges, StateGauges, observe_queues, observe_state
from tracelake.dispatcher.settings import DispatcherSettings
from tracelake.dispatcher.steps.accept_delivery import collect_bodies
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deliveries import collect_messages
from tracelake.dispatcher.steps.source_requests import route_waiting
from tracelake.dispatcher.steps.upkeep import (
    begin_listening,
    reap_leases,
    reconcile_partitions,
    rewake_queued,
    watch_sources,
)
from tracelake.domain.errors import Unavailable
from tracelake.queue.base import Queue

log = structlog.get_logger(__name__)


def periodic_loops(
    settings: DispatcherSettings,
    ctx: StepContext,
    queue: Queue,
    delivery: OutboxDelivery,
    registry: CollectorRegistry,
) -> list[Coroutine[Any, Any, None]]:
    gauges, followers = StateGauges(registry), ChainGauges(registry)
    reaper = Reaper(ctx, settings.reap_seconds)
    return [
        delivery.deliver_fresh(),
        balance_queues(ctx),
        every(settings.outbox_sweep_seconds, "outbox", delivery.sweep),
        every(settings.reap_seconds, "reaper", reaper.reap, on_error=reaper.reset_listening),
        every(settings.rewake_seconds, "rewake", lambda: rewake_queued(ctx, settings.rewake_after_seconds)),
        every(
            settings.reconcile_seconds,
            "reconcile",
            lambda: reconcile_partitions(ctx),
            nudge=ctx.missing_work,
            share=0.05,
        ),
        every(settings.watch_sources_seconds, "sources", lambda: watch_sources(ctx)),
        every(settings.collect_seconds, "deliveries", lambda: collect_messages(ctx)),
        every(settings.collect_seconds, "bodies", lambda: collect_bodies(ctx)),
        every(
            settings.watch_sources_seconds, "requests", lambda: route_waiting(ctx), nudge=ctx.waiting_requests
        ),
        every(
            settings.observe_seconds,
            "observe",
            lambda: observe_state(ctx.db, gauges, followers),
        ),
        every(
            settings.observe_seconds,
            "observe queues",
            lambda: observe_queues(queue, ctx.runtimes, gauges),
        ),
    ]


class Reaper:
    """Remembers since when this process has been able to receive heartbeats.

    A late pass means that the process, or the machine with its database, stood still meanwhile: heartbeats of that
    time may still be on their way.
    """

    def __init__(self, ctx: StepContext, every_seconds: float) -> None:
        self._ctx = ctx
        # One pass may be slow under load; two periods without any mean that the process stood still.
        self._late = timedelta(seconds=2 * every_seconds + 1)
        self._listening_since: datetime | None = None
        self._last_pass: datetime | None = None

    def reset_listening(self) -> None:
        self._listening_since = None

    async def reap(self) -> None:
        # The database's clock, which leases are measured by. This machine's may be wrong, or may have slept.
        now = await begin_listening(self._ctx)
        if self._last_pass is None or now - self._last_pass > self._late or self._listening_since is None:
            self._listening_since = now
        self._last_pass = now
        await reap_leases(self._ctx, self._listening_since)


async def every(
    seconds: float,
    what: str,
    work: Callable[[], Awaitable[object]],
    *,
    nudge: asyncio.Event | None = None,
    on_error: Callable[[], None] | None = None,
    share: float = 1.0,
) -> None:
    """Run ``work`` forever: at once, then every ``seconds`` or when ``nudge`` is set, whichever is first.

    ``share`` is the maximum share of time that the work may take: longer work waits longer for its next turn.
    """
    nudge = nudge or asyncio.Event()
    while True:
        # Before the work: a nudge that comes during it may be about something it no longer sees.
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
