"""``tracelake worker --runtime lambda``: wires the invoker together, runs it until it is stopped, and ends it in
order.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from tracelake.contracts.bundles import REGISTER_SECONDS
from tracelake.domain.backoff import Backoff, spread
from tracelake.domain.errors import Conflict, TracelakeError
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.sandbox.sandbox import Sandbox
from tracelake.serving import local_sockets
from tracelake.worker.lambda_.bundle_cache import BundleCache
from tracelake.worker.lambda_.environment import EnvironmentPool
from tracelake.worker.lambda_.function_program import build_layer
from tracelake.worker.lambda_.invoke_server import MAX_EVENT_BYTES, InvokeEndpoint, InvokeServer
from tracelake.worker.lambda_.invoker import Invoker
from tracelake.worker.lambda_.journal import Journal
from tracelake.worker.lambda_.start_environment import EnvironmentStarter
from tracelake.worker.metrics import AttemptMetrics
from tracelake.worker.settings import WorkerSettings

_MAX_PLACES = 64
_SOCKET = "invoker.sock"
_IDLE_LOOK_SECONDS = 0.5
# All invokers are refused at once, and must not return together.
_REFUSED_BACKOFF = Backoff(first=0.5, longest=1.0)
_FAREWELL_SECONDS = 2.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Signals:
    """``stop`` begins the drain, ``stop_now`` cuts it short."""

    stop: asyncio.Event
    stop_now: asyncio.Event
    on_ready: Callable[[], None]


async def run_invoker(
    settings: WorkerSettings,
    stop: asyncio.Event,
    on_ready: Callable[[], None],
    stop_now: asyncio.Event | None = None,
    metrics: AttemptMetrics | None = None,
) -> None:
    """Run until ``stop`` is set, or ``idle_timeout`` has passed without work, and every attempt is ended and
    reported.

    Raises ``Unavailable`` with what is missing and how to get it when there can be no sandbox here.
    """
    sandbox = await Sandbox.open()
    try:
        # A worker's own folder is new with each start, but a successor must find its predecessor's files.
        with _InvokerFolder(settings.work_folder.parent) as place:
            signals = _Signals(stop, stop_now or asyncio.Event(), on_ready)
            await _run(settings, sandbox, place.folder, signals, metrics)
    finally:
        await sandbox.close()


async def _run(
    settings: WorkerSettings,
    sandbox: Sandbox,
    folder: Path,
    signals: _Signals,
    metrics: AttemptMetrics | None,
) -> None:
    journal = Journal(folder / "journal")
    await asyncio.to_thread(build_layer, folder / "layer")
    async with AsyncExitStack() as stack:
        dispatcher = DispatcherClient(settings.internal_url, settings.worker_token)
        stack.push_async_callback(dispatcher.close)
        starter = EnvironmentStarter(
            sandbox,
            BundleCache(folder / "bundles", dispatcher.fetch_bundle),
            layer=folder / "layer",
            folder=folder / "environments",
            internal_url=settings.internal_url,
            query_url=settings.query_url,
        )
        pool = EnvironmentPool(starter.start, starter.still_good, max_idle=settings.concurrency)
        invoker = Invoker(
            dispatcher,
            pool,
            journal,
            log_folder=settings.log_folder,
            concurrency=settings.concurrency,
            metrics=metrics,
        )
        invoker.report_unfinished()
        try:
            await _serve(settings, invoker, dispatcher, folder, signals)
        finally:
            await pool.close()
            journal.close()


def _listen(internal_url: str, folder: Path) -> tuple[socket.socket, str]:
    """A Dispatcher on this machine connects by a socket file that no other user can reach."""
    if local_sockets.is_loopback_url(internal_url):
        path = folder.absolute() / _SOCKET
        return local_sockets.listen_privately(path), local_sockets.private_address(path)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


async def _serve(
    settings: WorkerSettings, invoker: Invoker, dispatcher: DispatcherClient, folder: Path, signals: _Signals
) -> None:
    endpoint = InvokeEndpoint(invoker, settings.worker_token)
    server = InvokeServer(endpoint.handle, admit=endpoint.admit, max_body=MAX_EVENT_BYTES)
    listener, url = _listen(settings.internal_url, folder)
    await server.start(listener)
    keeper = asyncio.create_task(_keep_registered(dispatcher, url, settings.concurrency, signals.on_ready))
    try:
        over = asyncio.create_task(_until_over(settings, invoker, signals.stop))
        try:
            await asyncio.wait({over, keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if keeper.done():
            # An invoker that isn't registered gets no more work: it ends, and is restarted.
            keeper.result()
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        # At the same time: a Dispatcher that doesn't answer must not shorten the drain.
        await asyncio.gather(
            _unregister(dispatcher, url),
            invoker.stop(settings.drain_seconds, signals.stop_now),
            return_exceptions=True,
        )
        await server.close()
        (folder / _SOCKET).unlink(missing_ok=True)


async def _until_over(settings: WorkerSettings, invoker: Invoker, stop: asyncio.Event) -> None:
    if settings.idle_timeout is None:
        await stop.wait()
    while not stop.is_set():
        idle = time.monotonic() - invoker.idle_since if not invoker.running else 0.0
        if settings.idle_timeout is not None and idle >= settings.idle_timeout:
            _log.info("idle", seconds=settings.idle_timeout)
            return
        try:
            async with asyncio.timeout(_IDLE_LOOK_SECONDS):
                await stop.wait()
        except TimeoutError:
            continue


class _InvokerFolder:
    """A folder for one invoker at a time. A successor gets the folder of an invoker that ended, with its journal
    and its bundles; a second invoker beside it gets the next."""

    def __init__(self, work_folder: Path) -> None:
        work_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MAX_PLACES):
            self.folder = work_folder / f"invoker-{number}"
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                continue
            return
        raise Conflict("TooManyInvokers", f"{_MAX_PLACES} invokers work in {work_folder} already")

    def __enter__(self) -> _InvokerFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


async def _keep_registered(
    dispatcher: DispatcherClient, url: str, concurrency: int, on_first: Callable[[], None]
) -> None:
    """Run for ever, since the Dispatcher forgets invokers that don't report. ``on_first`` is called after the first
    registration."""
    refusals, first = _REFUSED_BACKOFF.counter(), True
    while True:
        try:
            await dispatcher.register_invoker(url, concurrency)
        except TracelakeError as error:
            if not refusals.failures:
                _log.warning("not_registered", error=str(error))
            await asyncio.sleep(refusals.failed(jitter=spread()))
            continue
        if first:
            on_first()
        if first or refusals.failures:
            _log.info("registered", url=url, concurrency=concurrency)
        first = False
        refusals.succeeded()
        await asyncio.sleep(REGISTER_SECONDS)


async def _unregister(dispatcher: DispatcherClient, url: str) -> None:
    """If that fails, the Dispatcher forgets this invoker after a while."""
    try:
        async with asyncio.timeout(_FAREWELL_SECONDS):
            await dispatcher.register_invoker(url, 0)
    except (TracelakeError, TimeoutError) as error:
        _log.warning("unregister_failed", error=str(error) or type(error).__name__)
