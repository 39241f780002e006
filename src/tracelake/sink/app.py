"""The sink process: it receives wake-ups, claims sink tasks and runs one drain for each task that it holds.

One process serves every buffered dataset. Starting waits until a Dispatcher and a queue are available. ``stop``
lets received messages be written and releases the tasks, so that another sink claims them within moments instead of
after a lease; ``stop_now`` cuts that short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import structlog

from tracelake import objects
from tracelake import queue as queues
from tracelake.contracts.buffers import SINK_QUEUE
from tracelake.contracts.dispatcher_api import WorkerRegistration
from tracelake.domain.runtimes import SINK
from tracelake.hot.buffers import BufferStore
from tracelake.leases.claim import Load, Poller, WakeUps, wait_for_queue
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.held_task import Heartbeats, HeldTask, Stop
from tracelake.leases.presence import registered
from tracelake.leases.report import HeldTaskReporter
from tracelake.queue.base import Queue
from tracelake.serving.metrics_port import MetricsAddress, process_registry, serve_metrics
from tracelake.settings import Secret
from tracelake.sink.metrics import SinkMetrics
from tracelake.sink.sink_task import SinkParts, SinkTask

#: The queue never gives a message up: one that was received often may be fine, and its sinks have died.
_NEVER = 2**31 - 1
_POOL_SIZE = 8
_CLAIMS_AT_ONCE = 100
_POLL_SECONDS = 1.0
_REPORT_SECONDS = 2.0
_LOOK_SECONDS = 0.05

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings:
    """``objects`` is the address of the object store, ``queue`` is where wake-ups for sink tasks arrive.
    ``drain_seconds``: time for writing received messages after a stop. ``metrics``: where the process is
    monitored."""

    internal_url: str
    worker_token: Secret
    queue_dsn: Secret
    data_write_dsn: Secret
    objects: str
    worker_id: str
    queue: str = SINK_QUEUE
    drain_seconds: float = 5
    metrics: MetricsAddress = field(default_factory=MetricsAddress)


async def run_sink(
    settings: SinkSettings, stop: asyncio.Event, stop_now: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    registry = process_registry("sink")
    async with serve_metrics(settings.metrics, registry), AsyncExitStack() as parts:
        # Starting waits for services without a limit, so a stop must be able to end it.
        starting = asyncio.create_task(_start(settings, parts, SinkMetrics(registry)))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        sink = starting.result()
        _log.info("sink_ready", worker_id=settings.worker_id)
        on_ready()
        polling = asyncio.create_task(sink.poll(stop))
        await asyncio.wait([polling, stopped], return_when=asyncio.FIRST_COMPLETED)
        # Not cancelled: a claim under way may bring leases, which have to be released.
        await asyncio.gather(polling)
        await sink.drain(settings.drain_seconds, stop_now)
    _log.info("sink_stopped", worker_id=settings.worker_id)


async def _start(settings: SinkSettings, parts: AsyncExitStack, metrics: SinkMetrics) -> Sink:
    client = DispatcherClient(settings.internal_url, settings.worker_token)
    parts.push_async_callback(client.close)
    queue = await wait_for_queue(
        lambda: queues.open(settings.queue_dsn.reveal(), max_receives=_NEVER, pool_size=_POOL_SIZE),
        settings.queue,
    )
    parts.push_async_callback(queue.close)
    await client.check()
    registration = WorkerRegistration(settings.worker_id[:200], SINK, _CLAIMS_AT_ONCE)
    await parts.enter_async_context(registered(client, registration))
    store = BufferStore(settings.data_write_dsn)
    parts.push_async_callback(store.close)
    sink = Sink(settings, client, queue, store, metrics)
    parts.push_async_callback(sink.close)
    return sink


class Sink:
    """The tasks that a process holds, from their claim until their completion was reported."""

    def __init__(
        self,
        settings: SinkSettings,
        client: DispatcherClient,
        queue: Queue,
        store: BufferStore,
        metrics: SinkMetrics,
    ) -> None:
        self._load = Load(_CLAIMS_AT_ONCE)
        metrics.watch(lambda: len(self._load.running))
        self._heartbeats = Heartbeats(lambda beat, timeout: client.heartbeat(beat, timeout=timeout))
        self._wake_ups = WakeUps(queue, settings.queue)
        self._reporter = HeldTaskReporter(client, self._load, self._heartbeats, self._wake_ups)
        self._running: set[asyncio.Task[None]] = set()
        self._poller = Poller(
            wake_ups=self._wake_ups,
            client=client,
            load=self._load,
            worker_id=settings.worker_id,
            accept=self._accept,
        )
        self._parts = SinkParts(
            client=client,
            queue=queue,
            store=store,
            objects=objects.open(settings.objects),
            on_progress=self._heartbeats.send_soon,
            metrics=metrics,
        )

    async def poll(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._poller.poll(_CLAIMS_AT_ONCE, _POLL_SECONDS)

    async def drain(self, seconds: float, stop_now: asyncio.Event) -> None:
        """Returns when all tasks were released, or their time is over."""
        loop = asyncio.get_running_loop()
        for held in self._load.held:
            held.stop(Stop.RELEASED)
        deadline = loop.time() + seconds
        while self._load.running and not stop_now.is_set() and loop.time() < deadline:
            await self._load.changed(_LOOK_SECONDS)
        for held in self._load.running:
            held.kill()
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=_REPORT_SECONDS)
        if left := self._load.held:
            _log.warning("drained_unreported", tasks=[str(held.task_id) for held in left])

    async def close(self) -> None:
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._heartbeats.close()
        await self._wake_ups.close(_REPORT_SECONDS)

    def _accept(self, held: HeldTask) -> None:
        self._heartbeats.keep(held)
        self._load.add_beside(held)
        running = asyncio.create_task(self._run(held))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _run(self, held: HeldTask) -> None:
        completion = None
        try:
            completion = await SinkTask(held, self._parts).run()
        finally:
            # The time doesn't count: a task that runs beside others is in no mean.
            self._load.ran(held, 0)
            if completion is None:
                # Superseded or cancelled: the wake-up is released, and the next claim finds out.
                self._reporter.let_go(held)
        if completion is not None:
            await self._reporter.report(held, completion)
