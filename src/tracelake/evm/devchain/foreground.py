"""A dev chain as a process of its own: served until SIGINT or SIGTERM, growing by itself if it is told to."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread

from tracelake.domain.errors import Unavailable
from tracelake.evm.devchain.autopilot import Autopilot
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.growth import Growth
from tracelake.evm.devchain.methods import ChainMethods
from tracelake.evm.devchain.server import listen, url_of

_PROGRESS_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_END_SECONDS = 2.0
"""For answers that are under way; whoever is told to stop stops, in the middle of a call."""

Progress = Callable[[int, int], None]


def serve_until_told(
    chain: DevChain,
    autopilot: Autopilot | None,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    on_progress: Progress,
) -> None:
    """``on_ready`` hears the URL once the whole chain is made: from then on no request has to wait for that.
    While it is made, ``on_progress`` hears now and then how many blocks there are, and of how many."""
    ends: SimpleQueue[BaseException | None] = SimpleQueue()
    told: list[Callable[[], object]] = []

    async def serve() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        told.append(lambda: loop.call_soon_threadsafe(over.set))
        await _serve(over, chain, autopilot, host, port, on_ready, on_progress)

    def run() -> None:
        try:
            asyncio.run(serve())
            ends.put(None)
        except BaseException as error:
            ends.put(error)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ends.put(None))
    # Not in this thread: a call that takes long keeps a loop from everything else, and this one hears of signals.
    serving = Thread(target=run, name="devchain", daemon=True)
    serving.start()
    if (error := _next(ends)) is not None:
        raise error
    for tell in told:
        # It may be over.
        with suppress(RuntimeError):
            tell()
    serving.join(_END_SECONDS)


def _next(ends: SimpleQueue[BaseException | None]) -> BaseException | None:
    """Looks up now and then: a signal that comes just before the wait begins would otherwise not end it."""
    while True:
        with suppress(Empty):
            return ends.get(timeout=_LOOK_SECONDS)


async def _serve(
    told: asyncio.Event,
    chain: DevChain,
    autopilot: Autopilot | None,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    on_progress: Progress,
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
        await _made_or_told(chain, told, on_progress)
        if not told.is_set():
            on_ready(url_of(server))
            if pilot is not None:
                pilot.start()
        await told.wait()
    finally:
        stop.set()
        server.close()
        for connection in tuple(connections):
            connection.close()
        if pilot is not None and pilot.is_alive():
            await loop.run_in_executor(None, pilot.join)


async def _made_or_told(chain: DevChain, told: asyncio.Event, on_progress: Progress) -> None:
    """Make the chain in a thread that nobody waits for: whoever is told to stop stops, in the middle of a block."""
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
                if told.is_set():
                    return
            loop.call_soon_threadsafe(made.set_result, None)
        except BaseException as error:
            loop.call_soon_threadsafe(made.set_exception, error)

    Thread(target=make, daemon=True).start()
    stopped = asyncio.ensure_future(told.wait())
    while not (made.done() or stopped.done()):
        await asyncio.wait((made, stopped), timeout=_PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not (made.done() or stopped.done()):
            on_progress(done, chain.head + 1)
    stopped.cancel()
    if made.done():
        made.result()
