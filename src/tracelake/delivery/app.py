"""The delivery process: it claims delivery tasks and sends for each that it holds.

One process serves every delivery; further ones take over when it releases them, and never send beside it. It reads
rows by the role that can only read, and holds the secrets of receivers. ``stop`` lets tries that have begun end and
releases the tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import structlog

from tracelake import queue as queues
from tracelake.contracts.deliveries import DELIVERY_QUEUE
from tracelake.contracts.dispatcher_api import WorkerRegistration
from tracelake.delivery.addresses import Allowance, ReceiverAddresses, SystemNames
from tracelake.delivery.delivery_task import DeliveryParts, DeliveryTask, Patience
from tracelake.delivery.http_post import HttpPoster
from tracelake.delivery.rows import RowSignals
from tracelake.delivery.smtp import Mailer
from tracelake.delivery.targets import TRY_SECONDS, TargetParts
from tracelake.domain.runtimes import DELIVERY
from tracelake.leases.claim import reach_stack
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.platform_task import CLAIMS_AT_ONCE, PlatformHolder, run_holder
from tracelake.leases.presence import registered
from tracelake.serving.metrics_port import MetricsAddress, process_registry, serve_metrics
from tracelake.settings import Secret
from tracelake.tokens.named_secrets import SecretProvider

#: The queue never gives a wake-up up.
_NEVER = 2**31 - 1
_POOL_SIZE = 4

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """``allowance`` are the hosts that may be reached in plain text and at any address; ``metrics``: where the
    process is monitored."""

    internal_url: str
    worker_token: Secret
    queue_dsn: Secret
    data_read_dsn: Secret
    secrets: SecretProvider
    worker_id: str
    allowance: Allowance = field(default_factory=Allowance)
    queue: str = DELIVERY_QUEUE
    drain_seconds: float = 20
    try_seconds: float = TRY_SECONDS
    in_flight: int = 64
    metrics: MetricsAddress = field(default_factory=MetricsAddress)
    patience: Patience = field(default_factory=Patience)


async def run_delivery(
    settings: DeliverySettings, stop: asyncio.Event, stop_now: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    def ready() -> None:
        _log.info("delivery_ready", worker_id=settings.worker_id)
        on_ready()

    async with serve_metrics(settings.metrics, process_registry("delivery")):
        start = partial(_start, settings)
        await run_holder(start, stop, stop_now, on_ready=ready, drain_seconds=settings.drain_seconds)
    _log.info("delivery_stopped", worker_id=settings.worker_id)


async def _start(settings: DeliverySettings, parts: AsyncExitStack) -> PlatformHolder:
    client = DispatcherClient(settings.internal_url, settings.worker_token)
    parts.push_async_callback(client.close)
    queue = await reach_stack(
        client,
        lambda: queues.open(settings.queue_dsn.reveal(), max_receives=_NEVER, pool_size=_POOL_SIZE),
        settings.queue,
    )
    parts.push_async_callback(queue.close)
    registration = WorkerRegistration(settings.worker_id[:200], DELIVERY, CLAIMS_AT_ONCE)
    await parts.enter_async_context(registered(client, registration))
    signals = RowSignals(settings.data_read_dsn)
    signals.start()
    parts.push_async_callback(signals.close)
    names = SystemNames()
    parts.callback(names.close)
    addresses = ReceiverAddresses(settings.allowance, names)
    poster = HttpPoster(addresses)
    parts.callback(poster.close)
    shared = DeliveryParts(
        client=client,
        data_read_dsn=settings.data_read_dsn,
        signals=signals,
        targets=TargetParts(poster, Mailer(addresses), settings.secrets, settings.try_seconds),
        on_progress=lambda held: holder.progressed(held),
        patience=settings.patience,
        in_flight=settings.in_flight,
    )
    holder = PlatformHolder(
        client=client,
        queue=queue,
        queue_name=settings.queue,
        worker_id=settings.worker_id,
        make=lambda held: DeliveryTask(held, shared),
    )
    parts.push_async_callback(holder.close)
    return holder
