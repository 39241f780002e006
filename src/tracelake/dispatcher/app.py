"""The Dispatcher process: wires the state database, the queue, the steps, the loops and both ports together."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from tracelake.dispatcher.api.apps import internal_app, user_app
from tracelake.dispatcher.api.query_service import QueryService
from tracelake.dispatcher.coalescing_dispatch import CoalescingDispatch
from tracelake.dispatcher.invoker_client import InvokerClient
from tracelake.dispatcher.loops.deliver_buffers import BufferDelivery
from tracelake.dispatcher.loops.deliver_outbox import OutboxDelivery
from tracelake.dispatcher.loops.every import every
from tracelake.dispatcher.loops.hand_over import HandOvers
from tracelake.dispatcher.loops.invoke_functions import FunctionInvocations, look_who_is_there
from tracelake.dispatcher.loops.invokers import Invokers
from tracelake.dispatcher.loops.keep_installation import (
    QUEUE_ROLE,
    InstallationKeeper,
    queue_logins,
    state_logins,
)
from tracelake.dispatcher.loops.observe_state import observe_state
from tracelake.dispatcher.loops.run_in_process import InProcessRuntime
from tracelake.dispatcher.metrics import StateGauges, StepMetrics
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.settings import DispatcherSettings
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.emission_caps import Emissions
from tracelake.dispatcher.steps.reap_leases import begin_listening, reap_leases
from tracelake.dispatcher.steps.reconcile_partitions import reconcile_partitions
from tracelake.dispatcher.steps.rewake_queued import rewake_queued
from tracelake.dispatcher.steps.watch_sources import watch_sources
from tracelake.domain.entropy import Entropy
from tracelake.domain.errors import Unavailable
from tracelake.objects.directory import DirectoryStore
from tracelake.pool_end import close_pool
from tracelake.queue.base import Queue
from tracelake.queue.install import open_databases
from tracelake.queue.postgres import PostgresQueue
from tracelake.serving.http_metrics import HttpMetrics
from tracelake.serving.listener import Listener
from tracelake.store import users
from tracelake.store.db import CLOSE_SECONDS, Database, DeployLock, Transaction, open_pool
from tracelake.store.installation import join
from tracelake.store.invokers import InvokerRow
from tracelake.store.jobs import JobCards
from tracelake.store.migrate import migrate
from tracelake.tokens.home_copies import Shared
from tracelake.tokens.signing import PemKeyring
from tracelake.tokens.worker_tokens import WorkerTokens, valid_tokens

log = structlog.get_logger(__name__)

DRAIN_SECONDS = 1.5
FIXED_INVOKER_CALLS = 16
"""At a time, to an invoker that doesn't register and so doesn't say how many it takes."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    user_url: str
    internal_url: str


async def run_dispatcher(
    settings: DispatcherSettings, stop: asyncio.Event, on_ready: Callable[[Endpoints], None]
) -> None:
    """Serve until ``stop`` is set, then finish what is under way and leave."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    async with AsyncExitStack() as stack:
        user_port = Listener("user", settings.host, settings.user_port)
        stack.callback(user_port.close)
        internal_port = Listener("internal", settings.host, settings.internal_port)
        stack.callback(internal_port.close)
        shared = await _prepare_state(settings)
        ctx, keyring = await stack.enter_async_context(_steps(settings, registry))
        queue = await stack.enter_async_context(_queue(settings, shared))
        keeper = InstallationKeeper(settings, ctx.db)
        stack.push_async_callback(keeper.close)
        query = QueryService(settings.query_url)
        stack.push_async_callback(query.close)
        dispatch = CoalescingDispatch(ctx)
        local = InProcessRuntime(dispatch, f"dispatcher:{socket.gethostname()}:{os.getpid()}")
        functions = _functions(settings, dispatch, registry)
        delivery = OutboxDelivery(ctx.db, queue, ctx.runtimes, local.submit, functions.offer, registry)
        buffers = BufferDelivery(ctx.db, queue, registry)
        metrics = HttpMetrics(registry)
        checks = {"queue": _check(queue)}
        servers = [
            user_port.serve(user_app(dispatch, metrics=metrics, checks=checks, query=query, queue=queue)),
            internal_port.serve(
                internal_app(
                    dispatch,
                    worker_tokens=WorkerTokens(file=settings.home.worker_token_file),
                    public_keys=keyring.public_keys,
                    metrics=metrics,
                    checks=checks,
                )
            ),
        ]
        serving = [asyncio.create_task(server) for server in servers]
        loops = [asyncio.create_task(loop) for loop in _loops(settings, ctx, queue, delivery, registry)]
        loops.append(asyncio.create_task(every(settings.installation_seconds, "installation", keeper.look)))
        loops.append(asyncio.create_task(functions.run()))
        loops.append(asyncio.create_task(buffers.deliver_fresh()))
        loops.append(asyncio.create_task(every(settings.outbox_sweep_seconds, "buffers", buffers.sweep)))
        await asyncio.gather(user_port.started(), internal_port.started())
        _look_less_often_for_cycles()
        endpoints = Endpoints(user_port.url, internal_port.url)
        log.info("dispatcher ready", user_url=endpoints.user_url, internal_url=endpoints.internal_url)
        on_ready(endpoints)
        failure = await _until_stopped(stop, [*serving, *loops])
        log.info("dispatcher stopping")
        user_port.stop()
        internal_port.stop()
        await asyncio.gather(*serving, return_exceptions=True)
        # The loops first: what they would hand to the in-process runtime now is another replica's to do.
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops, timeout=DRAIN_SECONDS)
        await asyncio.gather(local.drain(DRAIN_SECONDS), functions.drain(DRAIN_SECONDS))
    log.info("dispatcher stopped")
    if failure is not None:
        raise failure


def _look_less_often_for_cycles() -> None:
    """What was made at start stays, and requests leave few cycles behind: looking for them after every few
    hundred objects, as Python does, takes an eighth of a busy Dispatcher's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _check(queue: Queue) -> Callable[[], Awaitable[None]]:
    async def check() -> None:
        await queue.depths()

    return check


async def _until_stopped(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> BaseException | None:
    """Until told to stop, or until one of ``tasks``, none of which should ever end, ends; then why it did."""
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
        db = Database(pool, on_silence=pool.expire_connections)
        org_id = await db.run(lambda tx: _first_user(tx, settings), lock=DeployLock.NONE)
        keyring = PemKeyring(settings.home.key_folder)
        settings.object_root.mkdir(parents=True, exist_ok=True)
        yield (
            StepContext(
                db=db,
                entropy=Entropy(),
                cards=JobCards(),
                objects=DirectoryStore(settings.object_root),
                signer=keyring,
                runtimes=RuntimeRegistry(settings.runtimes),
                org_id=org_id,
                emissions=Emissions(
                    events=settings.task_events, records=settings.task_records, size=settings.task_bytes
                ),
                metrics=StepMetrics(registry),
            ),
            keyring,
        )
    finally:
        await close_pool(pool, CLOSE_SECONDS)


async def _first_user(tx: Transaction, settings: DispatcherSettings) -> UUID:
    org_id = await users.ensure_org(tx)
    user_id = await users.ensure_user(tx, org_id, "admin")
    if token := settings.home.read().user_token:
        await users.keep_token(tx, user_id, token, "installation")
    return org_id


async def _prepare_state(settings: DispatcherSettings) -> Shared:
    try:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(settings.state_dsn.reveal(), timeout=10)
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise Unavailable("StateUnavailable", f"can't connect to the state database: {error}") from None
    try:
        for name in await migrate(connection):
            log.info("migration applied", migration=name)
        shared, changed = await join(connection, settings.home, settings.given)
        if changed:
            log.warning(
                "the home's copies of the installation's secrets differed", home=str(settings.home.folder)
            )
        await state_logins(settings.state_dsn, shared, connection).take(connection)
    finally:
        await connection.close()
    return shared


def _functions(
    settings: DispatcherSettings, dispatch: CoalescingDispatch, registry: CollectorRegistry
) -> FunctionInvocations:
    invokers = Invokers()
    client = InvokerClient(lambda: valid_tokens(settings.home.worker_token_file))
    fixed = (
        [InvokerRow(settings.invoker_url.rstrip("/"), FIXED_INVOKER_CALLS)] if settings.invoker_url else []
    )
    look = partial(look_who_is_there, dispatch.ctx.db, invokers, fixed)
    hand_overs = HandOvers(dispatch, client, invokers, look, registry)
    return FunctionInvocations(dispatch.ctx.db, invokers, look, hand_overs, registry)


@asynccontextmanager
async def _queue(settings: DispatcherSettings, shared: Shared) -> AsyncIterator[Queue]:
    dsn = settings.queue_dsn.reveal()
    connection: asyncpg.Connection[Any] = await asyncpg.connect(dsn, timeout=10)
    try:
        await queue_logins(settings.queue_dsn, shared).take(connection)
        still_open = await open_databases(connection, QUEUE_ROLE)
    finally:
        await connection.close()
    if exposed := [name for name in still_open if name not in ("postgres", "template1")]:
        log.warning("the queue's role may connect to other databases", databases=exposed)
    queue = await PostgresQueue.open(dsn)
    try:
        yield queue
    finally:
        await queue.close()


def _loops(
    settings: DispatcherSettings,
    ctx: StepContext,
    queue: Queue,
    delivery: OutboxDelivery,
    registry: CollectorRegistry,
) -> list[Coroutine[Any, Any, None]]:
    gauges = StateGauges(registry)
    reaper = _Reaper(ctx, settings.reap_seconds)
    return [
        delivery.deliver_fresh(),
        every(settings.outbox_sweep_seconds, "outbox", delivery.sweep),
        every(settings.reap_seconds, "reaper", reaper.reap, on_error=reaper.deaf),
        every(settings.rewake_seconds, "rewake", lambda: rewake_queued(ctx, settings.rewake_after_seconds)),
        every(
            settings.reconcile_seconds,
            "reconcile",
            lambda: reconcile_partitions(ctx),
            nudge=ctx.missing_work,
            share=0.05,
        ),
        every(settings.watch_sources_seconds, "sources", lambda: watch_sources(ctx)),
        every(
            settings.observe_seconds,
            "observe",
            lambda: observe_state(ctx.db, queue, ctx.runtimes, gauges),
        ),
    ]


class _Reaper:
    """Remembers since when this process has been able to hear heartbeats.

    A pass that comes late means that the process, or the machine with its database, stood still meanwhile:
    what workers said then may still be on its way.
    """

    def __init__(self, ctx: StepContext, every_seconds: float) -> None:
        self._ctx = ctx
        self._late = timedelta(seconds=2 * every_seconds + 1)
        self._listening_since: datetime | None = None
        self._last_pass: datetime | None = None

    def deaf(self) -> None:
        self._listening_since = None

    async def reap(self) -> None:
        now = await begin_listening(self._ctx)
        if self._last_pass is None or now - self._last_pass > self._late or self._listening_since is None:
            self._listening_since = now
        self._last_pass = now
        await reap_leases(self._ctx, self._listening_since)
