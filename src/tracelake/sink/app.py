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
from functools import partial

import structlog

from tracelake import objects
from tracelake import queue as queues
from tracelake.contracts.buffers import SINK_QUEUE
from tracelake.contracts.dispatcher_api import WorkerRegistration
from tracelake.domain.runtimes import SINK
from tracelake.hot.buffers import BufferStore
from tracelake.leases.claim import reach_stack
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.platform_task import CLAIMS_AT_ONCE, PlatformHolder, run_holder
from tracelake.leases.presence import registered
from tracelake.serving.metrics_port import MetricsAddress, process_registry, serve_metrics
from tracelake.settings import Secret
from tracelake.sink.metrics import SinkMetrics
from tracelake.sink.sink_task import SinkParts, SinkTask

#: The queue never gives a message up: one that was received often may be fine, and its sinks have died.
_NEVER = 2**31 - 1
_POOL_SIZE = 8

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
    metrics = SinkMetrics(registry)

    def ready() -> None:
        _log.info("sink_ready", worker_id=settings.worker_id)
        on_ready()

    async with serve_metrics(settings.metrics, registry):
        start = partial(_start, settings, metrics)
        await run_holder(start, stop, stop_now, on_ready=ready, drain_seconds=settings.drain_seconds)
    _log.info("sink_stopped", worker_id=settings.worker_id)


async def _start(settings: SinkSettings, metrics: SinkMetrics, parts: AsyncExitStack) -> PlatformHolder:
    client = DispatcherClient(settings.internal_url, settings.worker_token)
    parts.push_async_callback(client.close)
    queue = await reach_stack(
        client,
        lambda: queues.open(settings.queue_dsn.reveal(), max_receives=_NEVER, pool_size=_POOL_SIZE),
        settings.queue,
    )
    parts.push_async_callback(queue.close)
    registration = WorkerRegistration(settings.worker_id[:200], SINK, CLAIMS_AT_ONCE)
    await parts.enter_async_context(registered(client, registration))
    store = BufferStore(settings.data_write_dsn)
    parts.push_async_callback(store.close)
    shared = SinkParts(
        client=client,
        queue=queue,
        store=store,
        objects=objects.open(settings.objects),
        on_progress=lambda held: sink.progressed(held),
        metrics=metrics,
    )
    sink = PlatformHolder(
        client=client,
        queue=queue,
        queue_name=settings.queue,
        worker_id=settings.worker_id,
        make=lambda held: SinkTask(held, shared),
    )
    metrics.watch(lambda: sink.running)
    parts.push_async_callback(sink.close)
    return sink
