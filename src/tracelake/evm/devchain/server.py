"""A dev chain as a node: ``running`` serves it from a thread, ``serve_until_signal`` in the foreground of a
process.

    with running(DevChain(seed=7)) as node:
        node.chain.mine(10)
        httpx.post(node.url, json={"jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber"})

``Autopilot`` makes a chain grow by itself: a block at every interval, and a reorg after a number of blocks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread

import structlog

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.jsonrpc import HttpProtocol, RpcMethods
from tracelake.evm.devchain.methods import ChainMethods
from tracelake.evm.devchain.profile import Growth
from tracelake.serving.http_limits import ConnectionLimiter, HttpLimits, tuned, within_descriptors

LOOPBACK = "127.0.0.1"
_PROGRESS_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_END_SECONDS = 2.0
"""Time for pending answers after a signal; then the process ends, in the middle of a call if need be."""
ServerProgress = Callable[[int, int], None]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunningChain:
    """``chain`` may be changed at any time, from any thread."""

    url: str
    chain: DevChain


@contextmanager
def running(chain: DevChain, *, port: int = 0) -> Iterator[RunningChain]:
    """Serve ``chain`` on a free loopback port, from a thread, until the block ends."""
    with serving(ChainMethods(chain), port=port) as url:
        yield RunningChain(url, chain)


@contextmanager
def serving(methods: RpcMethods, *, port: int = 0) -> Iterator[str]:
    """Serve ``methods`` on loopback from a thread; yields the URL."""
    loop = asyncio.new_event_loop()
    connections: set[asyncio.BaseTransport] = set()
    try:
        server = loop.run_until_complete(listen(methods, LOOPBACK, port, connections))
        thread = threading.Thread(target=loop.run_forever, name="devchain", daemon=True)
        thread.start()
        try:
            yield url_of(server)
        finally:
            # The loop runs in another thread, and ``stop`` alone wouldn't wake it.
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            server.close()
            for each in tuple(connections):
                each.abort() if isinstance(each, asyncio.Transport) else each.close()
            # Aborted connections report their end in the loop's next round.
            loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


async def listen(
    methods: RpcMethods,
    host: str,
    port: int,
    connections: set[asyncio.BaseTransport] | None = None,
    limits: HttpLimits | None = None,
) -> asyncio.Server:
    """Start a server; its open connections are kept in ``connections``."""
    kept = connections if connections is not None else set()
    door = ConnectionLimiter(within_descriptors(limits or tuned(HttpLimits(), os.environ)))
    return await asyncio.get_running_loop().create_server(
        lambda: HttpProtocol(methods, kept, door), host, port, backlog=1024
    )


def url_of(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_signal(
    chain: DevChain,
    autopilot: Autopilot | None,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    on_progress: ServerProgress,
) -> None:
    """Serve until SIGINT or SIGTERM. ``on_ready`` gets the URL once the whole chain is made, so that no request
    waits for it. Until then ``on_progress`` gets the number of blocks made and their total from time to
    time."""
    ends: SimpleQueue[BaseException | None] = SimpleQueue()
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        loop, stop_requested = asyncio.get_running_loop(), asyncio.Event()
        stops.append(lambda: loop.call_soon_threadsafe(stop_requested.set))
        await _serve(stop_requested, chain, autopilot, host, port, on_ready, on_progress)

    def run() -> None:
        try:
            asyncio.run(serve())
            ends.put(None)
        except BaseException as error:
            ends.put(error)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ends.put(None))
    # Python handles signals in the main thread: a long call in the loop must not delay them.
    serving = Thread(target=run, name="devchain", daemon=True)
    serving.start()
    if (error := _next(ends)) is not None:
        raise error
    for stop in stops:
        # The loop may have ended already.
        with suppress(RuntimeError):
            stop()
    serving.join(_END_SECONDS)


def _next(ends: SimpleQueue[BaseException | None]) -> BaseException | None:
    """Wait with a timeout: a signal just before the wait begins would otherwise not end it."""
    while True:
        with suppress(Empty):
            return ends.get(timeout=_LOOK_SECONDS)


async def _serve(
    stop_requested: asyncio.Event,
    chain: DevChain,
    autopilot: Autopilot | None,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    on_progress: ServerProgress,
) -> None:
    loop = asyncio.get_running_loop()
    connections: set[asyncio.BaseTransport] = set()
    growth = Growth(chain.profile.transactions)
    try:
        server = await listen(ChainMethods(chain, growth), host, port, connections)
    except OSError as error:
        raise Unavailable("PortTaken", f"can't listen on {host}:{port}: {error.strerror or error}") from None
    stop = Event()
    pilot = (
        Thread(target=autopilot.run, args=(chain, stop, growth), daemon=True)
        if autopilot is not None
        else None
    )
    try:
        await _made_or_stopped(chain, stop_requested, on_progress)
        if not stop_requested.is_set():
            on_ready(url_of(server))
            if pilot is not None:
                pilot.start()
        await stop_requested.wait()
    finally:
        stop.set()
        server.close()
        for connection in tuple(connections):
            connection.close()
        if pilot is not None and pilot.is_alive():
            await loop.run_in_executor(None, pilot.join)


async def _made_or_stopped(
    chain: DevChain, stop_requested: asyncio.Event, on_progress: ServerProgress
) -> None:
    """Make the chain in a daemon thread, so that a signal ends the process in the middle of a block."""
    loop = asyncio.get_running_loop()
    made = loop.create_future()
    heights = iter(range(chain.head + 1))
    done = 0

    def make() -> None:
        nonlocal done
        try:
            for height in heights:
                chain.block(height)
                done = height + 1
                if stop_requested.is_set():
                    return
            loop.call_soon_threadsafe(made.set_result, None)
        except BaseException as error:
            loop.call_soon_threadsafe(made.set_exception, error)

    Thread(target=make, daemon=True).start()
    stopped = asyncio.ensure_future(stop_requested.wait())
    while not (made.done() or stopped.done()):
        await asyncio.wait((made, stopped), timeout=_PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not (made.done() or stopped.done()):
            on_progress(done, chain.head + 1)
    stopped.cancel()
    if made.done():
        made.result()


@dataclass(frozen=True, slots=True)
class Autopilot:
    """Mines a block every ``block_time`` seconds; replaces the last ``reorg_depth`` every ``reorg_every``
    blocks (0: never)."""

    block_time: float
    reorg_every: int = 0
    reorg_depth: int = 1

    def run(self, chain: DevChain, stop: Event, growth: Growth | None = None) -> None:
        """Run until ``stop`` is set or the chain may not grow further. A reorg takes the place of a mined block and
        adds one more than it replaces, so the chain never gets shorter and each interval has one new head."""
        growth = growth or Growth(chain.profile.transactions)
        mined = 0
        while not stop.wait(self.block_time):
            mined += 1
            depth = min(self.reorg_depth, chain.head)
            reorgs = self.reorg_every > 0 and mined % self.reorg_every == 0 and depth > 0
            try:
                growth.add(depth + 1 if reorgs else 1)
            except Invalid as full:
                _log.warning("the chain grows no further", reason=full.message)
                return
            if reorgs:
                chain.reorg(depth, depth + 1)
            else:
                chain.mine()
            # Made now, so that the first reader of the new head needn't wait for it.
            chain.block(chain.head)
