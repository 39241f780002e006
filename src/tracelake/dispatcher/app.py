"""The Dispatcher process: wires the state database, the queue, the steps, the loops and both ports together.

Ports are bound first, so that a taken one is reported before the database is touched. A stop ends in the reverse
order: ports, then loops, then the runtimes of this process, each with a moment to finish.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from uuid import UUID

import structlog
from prometheus_client import CollectorRegistry

from tracelake import objects
from tracelake import queue as queues
from tracelake.dispatcher.api.apps import internal_app, user_app
from tracelake.dispatcher.api.query_proxy import QueryService
from tracelake.dispatcher.dispatch import CoalescingDispatch
from tracelake.dispatcher.invoker_client import InvokerClient
from tracelake.dispatcher.loops.deliver_outbox import BufferDelivery, OutboxDelivery
from tracelake.dispatcher.loops.invoke_functions import (
    FunctionInvocations,
    InvocationSender,
    Invokers,
    refresh_invokers,
)
from tracelake.dispatcher.loops.keep_installation import (
    InstallationSync,
    queue_password,
    state_logins,
)
from tracelake.dispatcher.loops.periodic import every, periodic_loops
from tracelake.dispatcher.loops.run_in_process import InProcessRuntime
from tracelake.dispatcher.metrics import StepMetrics
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.settings import DispatcherSettings
from tracelake.dispatcher.steps.context import Emissions, HookLimits, StepContext
from tracelake.domain.entropy import Entropy
from tracelake.domain.pressure import PressureSettings
from tracelake.postgres.sessions import close_pool
from tracelake.queue.base import Queue
from tracelake.serving.listener import Listener
from tracelake.serving.metrics_port import process_registry
from tracelake.serving.surface import HttpMetrics
from tracelake.store import pressure, users
from tracelake.store.db import Database, DeployLock, Transaction, open_pool
from tracelake.store.functions import InvokerRow
from tracelake.store.installation import connected_state, join, migrate
from tracelake.store.jobs import JobDefinitions
from tracelake.tokens.home_copies import Shared
from tracelake.tokens.opaque_tokens import WorkerTokens, valid_tokens
from tracelake.tokens.signing import PemKeyring

DRAIN_SECONDS = 1.5
FIXED_INVOKER_CALLS = 16
"""Concurrent calls to an invoker that doesn't register itself, whose number of slots is therefore unknown."""


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoints:
    user_url: str
    internal_url: str


async def run_dispatcher(
    settings: DispatcherSettings, stop: asyncio.Event, on_ready: Callable[[Endpoints], None]
) -> None:
    """Serve until ``stop`` is set, then finish the work under way and return."""
    async with AsyncExitStack() as stack:
        parts = await _start(settings, stack)
        # Clients call as soon as the Dispatcher is ready, so it is reported only when both ports answer.
        await asyncio.gather(parts.user_port.started(), parts.internal_port.started())
        _collect_garbage_less_often()
        endpoints = Endpoints(parts.user_port.url, parts.internal_port.url)
        log.info("dispatcher ready", user_url=endpoints.user_url, internal_url=endpoints.internal_url)
        on_ready(endpoints)
        failure = await _until_stopped(stop, [*parts.serving, *parts.loops])
        log.info("dispatcher stopping")
        await _drain(parts)
    log.info("dispatcher stopped")
    if failure is not None:
        raise failure


@dataclass(frozen=True, slots=True)
class _Parts:
    user_port: Listener
    internal_port: Listener
    serving: list[asyncio.Task[None]]
    loops: list[asyncio.Task[None]]
    local: InProcessRuntime
    functions: FunctionInvocations


async def _start(settings: DispatcherSettings, stack: AsyncExitStack) -> _Parts:
    """``stack`` closes what was opened, however far the start came."""
    registry = process_registry("dispatcher")
    user_port = Listener("user", settings.host, settings.user_port)
    stack.callback(user_port.close)
    internal_port = Listener("internal", settings.host, settings.internal_port)
    stack.callback(internal_port.close)
    shared = await _prepare_state(settings)
    ctx, keyring = await stack.enter_async_context(_steps(settings, registry))
    queue = await stack.enter_async_context(_queue(settings, shared))
    keeper = InstallationSync(settings, ctx.db)
    stack.callback(keeper.close)
    query = QueryService(settings.query_url)
    stack.push_async_callback(query.close)
    dispatch = CoalescingDispatch(ctx)
    local = InProcessRuntime(dispatch, f"dispatcher:{socket.gethostname()}:{os.getpid()}")
    functions = _functions(settings, dispatch, registry)
    delivery = OutboxDelivery(
        ctx.db,
        queue,
        ctx.runtimes,
        local.submit,
        functions.offer,
        registry,
        max_bulk_wait=settings.max_bulk_wait_seconds,
    )
    buffers = BufferDelivery(ctx.db, queue, registry)
    metrics = HttpMetrics(registry)
    checks = {"queue": _check(queue)}
    user = user_app(dispatch, metrics=metrics, checks=checks, query=query, queue=queue)
    internal = internal_app(
        dispatch,
        worker_tokens=WorkerTokens(file=settings.home.worker_token_file),
        public_keys=keyring.public_keys,
        metrics=metrics,
        checks=checks,
    )
    loops = [
        *periodic_loops(settings, ctx, queue, delivery, registry),
        every(settings.installation_seconds, "installation", keeper.look),
        functions.run(),
        buffers.deliver_fresh(),
        every(settings.outbox_sweep_seconds, "buffers", buffers.sweep),
    ]
    return _Parts(
        user_port,
        internal_port,
        [asyncio.create_task(serving) for serving in (user_port.serve(user), internal_port.serve(internal))],
        [asyncio.create_task(loop) for loop in loops],
        local,
        functions,
    )


async def _drain(parts: _Parts) -> None:
    parts.user_port.stop()
    parts.internal_port.stop()
    # A port that failed on its way down must not keep the loops and runtimes from ending in order.
    await asyncio.gather(*parts.serving, return_exceptions=True)
    # The loops first: tasks that they would start in this process now are for another replica.
    for loop in parts.loops:
        loop.cancel()
    await asyncio.wait(parts.loops, timeout=DRAIN_SECONDS)
    await asyncio.gather(parts.local.drain(DRAIN_SECONDS), parts.functions.drain(DRAIN_SECONDS))


def _collect_garbage_less_often() -> None:
    """Objects made at start stay, and requests leave few cycles behind: Python's default, a collection every few
    hundred objects, takes an eighth of a busy Dispatcher's time."""
    gc.collect()
    # After a collection, so that no garbage of the start is frozen with the rest.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _check(queue: Queue) -> Callable[[], Awaitable[None]]:
    async def check() -> None:
        await queue.depths()

    return check


async def _until_stopped(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> BaseException | None:
    """Returns when ``stop`` is set, or with the error of the first of ``tasks`` that ends: none of them should."""
    waiting = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in done - {waiting}:
        if error := task.exception():
            log.error("a part of the dispatcher failed", error=repr(error))
            return error
    return None


@asynccontextmanager
async def _steps(
    settings: DispatcherSettings, registry: CollectorRegistry
) -> AsyncIterator[tuple[StepContext, PemKeyring]]:
    pool = await open_pool(
        settings.state_dsn.reveal(), max_size=settings.state_connections, application="tracelake-dispatcher"
    )
    try:
        # One silent connection mostly means a lost server; the others would each cost a timeout to find out.
        db = Database(pool, on_silence=pool.expire_connections)
        org_id = await db.run(lambda tx: _first_user(tx, settings), lock=DeployLock.NONE)
        caps = settings.operators
        if caps is not None:
            await db.run(lambda tx: pressure.set_caps(tx, caps), lock=DeployLock.EXCLUSIVE)
        keyring = PemKeyring(settings.home.key_folder)
        yield (
            StepContext(
                db=db,
                entropy=Entropy(),
                definitions=JobDefinitions(),
                objects=objects.open(settings.objects),
                signer=keyring,
                runtimes=RuntimeRegistry(settings.runtimes),
                org_id=org_id,
                emissions=Emissions(
                    events=settings.task_events, records=settings.task_records, size=settings.task_bytes
                ),
                hook_limits=HookLimits(settings.hook_rate, settings.hook_burst),
                metrics=StepMetrics(registry),
                pressure=PressureSettings(
                    settings.pressure_low_mark,
                    timedelta(seconds=settings.pressure_patience_seconds),
                    timedelta(seconds=settings.pressure_min_hold_seconds),
                    timedelta(seconds=settings.max_bulk_wait_seconds),
                ),
            ),
            keyring,
        )
    finally:
        await close_pool(pool)


async def _first_user(tx: Transaction, settings: DispatcherSettings) -> UUID:
    org_id = await users.ensure_org(tx)
    user_id = await users.ensure_user(tx, org_id, "admin")
    if token := settings.home.read().user_token:
        await users.keep_token(tx, user_id, token, "installation")
    return org_id


async def _prepare_state(settings: DispatcherSettings) -> Shared:
    # Not a connection of the pool, whose statements end after 15 seconds: a migration may take longer.
    async with connected_state(settings.state_dsn.reveal()) as connection:
        for name in await migrate(connection):
            log.info("migration applied", migration=name)
        shared, changed = await join(connection, settings.home, settings.given)
        if changed:
            log.warning(
                "the home's copies of the installation's secrets differed", home=str(settings.home.folder)
            )
        await state_logins(settings.state_dsn, shared, connection).take(connection)
    return shared


def _functions(
    settings: DispatcherSettings, dispatch: CoalescingDispatch, registry: CollectorRegistry
) -> FunctionInvocations:
    invokers = Invokers()
    client = InvokerClient(lambda: valid_tokens(settings.home.worker_token_file))
    fixed = (
        [InvokerRow(settings.invoker_url.rstrip("/"), FIXED_INVOKER_CALLS)] if settings.invoker_url else []
    )
    look = partial(refresh_invokers, dispatch.ctx.db, invokers, fixed)
    sender = InvocationSender(dispatch, client, invokers, look, registry)
    return FunctionInvocations(
        dispatch.ctx.db, invokers, look, sender, registry, max_bulk_wait=settings.max_bulk_wait_seconds
    )


@asynccontextmanager
async def _queue(settings: DispatcherSettings, shared: Shared) -> AsyncIterator[Queue]:
    dsn = settings.queue_dsn.reveal()
    exposed = await queues.install(
        dsn, installation_id=shared.installation_id, password=queue_password(shared)
    )
    if exposed:
        log.warning("the queue's role may connect to other databases", databases=list(exposed))
    queue = await queues.open(dsn)
    try:
        yield queue
    finally:
        await queue.close()
