"""The scheduler process: a round at each tick, and every few seconds for what was deployed meanwhile.

It holds a worker token and no credential of a database. Time is the state database's, as the Dispatcher answers it;
this machine's clock is never read, only how long a wait took. Of several schedulers one acts, and the others try
every few seconds to take its place; one that stops gives its place up at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from time import monotonic

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tracelake.contracts.sources import SCHEDULER_LEASE_SECONDS
from tracelake.domain.errors import TracelakeError
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.scheduler.ticks import RoundResult, run_round
from tracelake.serving.metrics_port import MetricsAddress, process_registry, serve_metrics
from tracelake.settings import Secret

_RELEASE_SECONDS = 2.0
_SOON = 0.01
"""Added to a wait, which must not end before the tick's time has come."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """``poll_seconds``: the longest time until a new schedule is noticed, and between two tries of a scheduler that
    doesn't act."""

    internal_url: str
    worker_token: Secret
    scheduler_id: str
    poll_seconds: float = 3.0
    metrics: MetricsAddress = field(default_factory=MetricsAddress)


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._acts_until = float("-inf")
        acting = Gauge(
            "tracelake_scheduler_acting",
            "1 for the scheduler that acts, until its lease has run out.",
            registry=registry,
        )
        # As of the scrape: while the Dispatcher is away, a round has no end that could set it.
        acting.set_function(lambda: monotonic() < self._acts_until)
        self._ticks = Counter(
            "tracelake_scheduler_ticks_total", "Ticks sent, by answer.", ["state"], registry=registry
        )
        self._skipped = Counter(
            "tracelake_scheduler_ticks_skipped_total",
            "Missed ticks that were not made up for, at least.",
            registry=registry,
        )
        self._late = Histogram(
            "tracelake_scheduler_tick_late_seconds",
            "Time from a tick to its round.",
            buckets=(0.1, 0.5, 1, 5, 30, 60, 600, 3600),
            registry=registry,
        )

    def answered(self, acting: bool) -> None:
        self._acts_until = monotonic() + SCHEDULER_LEASE_SECONDS if acting else float("-inf")

    def count(self, done: RoundResult) -> None:
        self._skipped.inc(done.skipped)
        for tick in done.sent:
            self._ticks.labels(tick.state).inc()
            self._late.observe(max(0.0, done.now.timestamp() - tick.tick))


async def run_scheduler(
    settings: SchedulerSettings, stop: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    registry = process_registry("scheduler")
    async with serve_metrics(settings.metrics, registry), AsyncExitStack() as parts:
        client = DispatcherClient(settings.internal_url, settings.worker_token)
        parts.push_async_callback(client.close)
        # A call waits for the Dispatcher without a limit, so a stop must be able to end it.
        working = asyncio.create_task(_serve(settings, client, SchedulerMetrics(registry), on_ready))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if working.done():
            working.result()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        with suppress(TracelakeError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                await client.schedules(settings.scheduler_id, release=True)
    _log.info("scheduler_stopped", scheduler_id=settings.scheduler_id)


async def _serve(
    settings: SchedulerSettings,
    client: DispatcherClient,
    metrics: SchedulerMetrics,
    on_ready: Callable[[], None],
) -> None:
    await client.check()
    _log.info("scheduler_ready", scheduler_id=settings.scheduler_id)
    on_ready()
    loop = asyncio.get_running_loop()
    acting = False
    while True:
        began = loop.time()
        try:
            done = await run_round(client, settings.scheduler_id, metrics.answered)
        except TracelakeError as error:
            # The next round finds the same ticks due.
            _log.error("round_failed", reason=error.reason, error=error.message)
            await asyncio.sleep(settings.poll_seconds)
            continue
        if done.acting != acting:
            acting = done.acting
            _log.info("scheduler_acts" if acting else "scheduler_waits", scheduler_id=settings.scheduler_id)
        metrics.count(done)
        _report(done)
        await asyncio.sleep(_wait(done, settings.poll_seconds, loop.time() - began))


def _report(done: RoundResult) -> None:
    for tick in done.sent:
        late = round(done.now.timestamp() - tick.tick, 3)
        job = f"{tick.dag_name}/{tick.job}"
        _log.info("tick", job=job, tick=tick.tick, state=tick.state, late_seconds=late)
    if done.skipped:
        _log.warning("ticks_skipped", count=done.skipped)


def _wait(done: RoundResult, poll_seconds: float, spent: float) -> float:
    """Until the next tick, by the time that passed since the round began; never longer than a poll."""
    if done.next_at is None:
        return poll_seconds
    left = (done.next_at - done.now).total_seconds() - spent + _SOON
    return min(max(left, _SOON), poll_seconds)
