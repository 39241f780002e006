"""A dev chain as a process of its own: served until SIGINT or SIGTERM, growing by itself if it is told to."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from threading import Event, Thread

from tracelake.domain.errors import Unavailable
from tracelake.evm.devchain.autopilot import Autopilot
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.methods import ChainMethods
from tracelake.evm.devchain.server import listen, url_of

_STEP = 500


def serve_until_told(
    chain: DevChain, autopilot: Autopilot | None, host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    """``on_ready`` hears the URL once the whole chain is made: from then on no request has to wait for that."""
    asyncio.run(_serve(chain, autopilot, host, port, on_ready))


async def _serve(
    chain: DevChain, autopilot: Autopilot | None, host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, told.set)
    connections: set[asyncio.BaseTransport] = set()
    try:
        server = await listen(ChainMethods(chain), host, port, connections)
    except OSError as error:
        raise Unavailable("PortTaken", f"can't listen on {host}:{port}: {error.strerror or error}") from None
    stop = Event()
    pilot = Thread(target=autopilot.run, args=(chain, stop), daemon=True) if autopilot is not None else None
    try:
        for height in (*range(0, chain.head, _STEP), chain.head):
            if not told.is_set():
                await loop.run_in_executor(None, chain.block, height)
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
