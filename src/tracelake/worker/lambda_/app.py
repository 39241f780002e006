"""``tracelake worker --runtime lambda``: wired together, run until told to stop, taken apart in order."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from tracelake import private_socket
from tracelake.domain.errors import Conflict
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.lambda_.bundle_cache import BundleCache
from tracelake.worker.lambda_.dispatcher_link import DispatcherLink
from tracelake.worker.lambda_.environment_pool import EnvironmentPool
from tracelake.worker.lambda_.function_layer import build_layer
from tracelake.worker.lambda_.http_server import HttpServer
from tracelake.worker.lambda_.invoke_server import MAX_EVENT_BYTES, InvokeEndpoint
from tracelake.worker.lambda_.invoker import Invoker
from tracelake.worker.lambda_.journal import Journal
from tracelake.worker.lambda_.start_environment import EnvironmentStarter
from tracelake.worker.sandbox import Sandbox
from tracelake.worker.settings import WorkerSettings

_MAX_PLACES = 64
_SOCKET = "invoker.sock"
_IDLE_LOOK_SECONDS = 0.5

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Signals:
    """``stop`` begins the drain, ``hurry`` cuts it short."""

    stop: asyncio.Event
    hurry: asyncio.Event
    on_ready: Callable[[], None]


async def run_invoker(
    settings: WorkerSettings,
    stop: asyncio.Event,
    on_ready: Callable[[], None],
    hurry: asyncio.Event | None = None,
) -> None:
    """Returns when ``stop`` is set, or after ``idle_timeout`` without work, and all is ended and told.

    ``Unavailable`` with what is missing and how to get it when there can be no sandbox here.
    """
    sandbox = await Sandbox.open()
    try:
        # A worker's own folder is new with each start; a successor must find what was left behind.
        with _Place(settings.work_folder.parent) as place:
            signals = _Signals(stop, hurry or asyncio.Event(), on_ready)
            await _run(settings, sandbox, place.folder, signals)
    finally:
        await sandbox.close()


async def _run(settings: WorkerSettings, sandbox: Sandbox, folder: Path, signals: _Signals) -> None:
    journal = Journal(folder / "journal")
    await asyncio.to_thread(build_layer, folder / "layer")
    async with _dispatcher(settings) as (dispatcher, link):
        starter = EnvironmentStarter(
            sandbox,
            BundleCache(folder / "bundles", link.fetch_bundle),
            layer=folder / "layer",
            folder=folder / "environments",
            internal_url=settings.internal_url,
            query_url=settings.query_url,
        )
        pool = EnvironmentPool(starter.start, starter.still_good, max_idle=settings.concurrency)
        invoker = Invoker(
            dispatcher, pool, journal, log_folder=settings.log_folder, concurrency=settings.concurrency
        )
        invoker.report_unfinished()
        try:
            await _serve(settings, invoker, link, folder, signals)
        finally:
            await pool.close()
            journal.close()


def _listen(internal_url: str, folder: Path) -> tuple[socket.socket, str]:
    """A Dispatcher on this machine comes by a socket that no other user can reach."""
    if private_socket.is_here(internal_url):
        path = folder.absolute() / _SOCKET
        return private_socket.listen(path), private_socket.address_of(path)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


async def _serve(
    settings: WorkerSettings, invoker: Invoker, link: DispatcherLink, folder: Path, signals: _Signals
) -> None:
    endpoint = InvokeEndpoint(invoker, settings.worker_token)
    server = HttpServer(endpoint.handle, admit=endpoint.admit, max_body=MAX_EVENT_BYTES)
    listener, url = _listen(settings.internal_url, folder)
    await server.start(listener)
    keeper = asyncio.create_task(link.keep_registered(url, settings.concurrency, signals.on_ready))
    try:
        over = asyncio.create_task(_until_over(settings, invoker, signals.stop))
        try:
            await asyncio.wait({over, keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if keeper.done():
            # Nobody would hand it anything any more: it ends, and is started anew.
            keeper.result()
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await asyncio.gather(
            link.say_goodbye(url), invoker.stop(settings.drain_seconds, signals.hurry), return_exceptions=True
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


@asynccontextmanager
async def _dispatcher(settings: WorkerSettings) -> AsyncIterator[tuple[DispatcherClient, DispatcherLink]]:
    dispatcher = DispatcherClient(settings.internal_url, settings.worker_token)
    link = DispatcherLink(settings.internal_url, settings.worker_token)
    try:
        yield dispatcher, link
    finally:
        await dispatcher.close()
        await link.close()


class _Place:
    """A folder for one invoker at a time. A successor gets the folder of the one that ended, and with it its
    journal and its bundles; a second invoker beside it gets the next."""

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

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)
