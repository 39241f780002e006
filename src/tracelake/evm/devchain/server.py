"""The dev chain as a node: in a thread of the caller's process, or in the foreground.

with running(DevChain(seed=7)) as node:
    node.chain.mine(10)
    httpx.post(node.url, json={"jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber"})
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.http_protocol import HttpProtocol
from tracelake.evm.devchain.jsonrpc import Methods
from tracelake.evm.devchain.methods import ChainMethods
from tracelake.serving.http_limits import Door, HttpLimits, tuned, within_descriptors

LOOPBACK = "127.0.0.1"


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
def serving(methods: Methods, *, port: int = 0) -> Iterator[str]:
    """Serve ``methods`` on loopback from a thread; what is given is the URL."""
    loop = asyncio.new_event_loop()
    connections: set[asyncio.BaseTransport] = set()
    try:
        server = loop.run_until_complete(listen(methods, LOOPBACK, port, connections))
        thread = threading.Thread(target=loop.run_forever, name="devchain", daemon=True)
        thread.start()
        try:
            yield url_of(server)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            server.close()
            for each in tuple(connections):
                each.abort() if isinstance(each, asyncio.Transport) else each.close()
            loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


async def listen(
    methods: Methods,
    host: str,
    port: int,
    connections: set[asyncio.BaseTransport] | None = None,
    limits: HttpLimits | None = None,
) -> asyncio.Server:
    """A server that accepts already; its open connections are kept in ``connections``."""
    kept = connections if connections is not None else set()
    door = Door(within_descriptors(limits or tuned(HttpLimits(), os.environ)))
    return await asyncio.get_running_loop().create_server(
        lambda: HttpProtocol(methods, kept, door), host, port, backlog=1024
    )


def url_of(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
