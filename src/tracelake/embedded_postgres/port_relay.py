"""A loopback port for private clusters: what arrives there is passed on to the cluster's socket, within limits.

A port of the server's own would be open to every user of the machine: whoever connects and says nothing takes one
of the server's connections, before anybody asks for a password; and whoever listens there while the server is down
is told passwords. So the launcher holds the port (``HeldPort``) and passes connections on, once it has heard a
greeting that a driver would send (``startup_packet.py``). Whoever hasn't logged in
is a stranger: when there is no room for one more connection, a stranger gives way, of the user who has most of
them.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import cast

from tracelake.embedded_postgres.startup_packet import LARGEST, Greeting, judge, refusal
from tracelake.held_port import LOOPBACK, HeldPort
from tracelake.local_peer import uid_of
from tracelake.serving.http_limits import Door, HttpLimits, Peer

CONNECTIONS = 160
"""Of the server's own: the rest is for those who come by the socket."""
_LIMITS = HttpLimits(connections=CONNECTIONS, peer_connections=128)
_SILENT_SECONDS = 10.0
_BACKLOG = 256
_READ_BYTES = 64 * 1024
_UNSENT_BYTES = 256 * 1024
_LONGEST_GREETING = 2 * LARGEST
_MOST_DECLINED = 2
"""Once for each kind of encryption that a client may ask for."""
_LOGGED_IN = b"R\x00\x00\x00\x08\x00\x00\x00\x00"
"""``AuthenticationOk``, which the server sends once in a connection, before anything that a client could choose."""
_LOGIN_BYTES = 16 * 1024


class PortRelay:
    """A thread with an event loop, for as long as this process lives or until ``close``."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._clients: set[_Client] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="postgres-ports", daemon=True)
        self._thread.start()

    def serve(self, port: HeldPort, socket_path: Callable[[], str]) -> None:
        """``socket_path`` is asked for at each connection. A port that can't be held isn't served."""
        asyncio.run_coroutine_threadsafe(self._serve(port, socket_path), self._loop).result()

    def close(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for client in tuple(self._clients):
            client.turn_out()
        # Their transports are closed by the loop's next turn.
        await asyncio.sleep(0)

    async def _serve(self, port: HeldPort, socket_path: Callable[[], str]) -> None:
        if port.socket is None:
            return
        listening = port.socket.dup()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door = Door(_LIMITS)
        server = await self._loop.create_server(
            lambda: _Client(door, socket_path, self._clients), sock=listening, backlog=_BACKLOG
        )
        self._servers.append(server)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


class _End(asyncio.BufferedProtocol):
    """One end of a connection; what it receives is written to the other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._buffer = bytearray(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        if not self._buffer:
            self._buffer = bytearray(_READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received(bytes(memoryview(self._buffer)[:nbytes]))

    def _received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._other is not None:
            self._other.close()

    def close(self) -> None:
        """What was written is still sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Client(_End):
    """Who connected to the port; a stranger until the server has let it in."""

    def __init__(self, door: Door, socket_path: Callable[[], str], clients: set[_Client]) -> None:
        super().__init__()
        self._clients = clients
        self._door = door
        self._socket_path = socket_path
        self._greeting = b""
        self._declined = 0
        self._connecting: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self.peer = Peer(LOOPBACK)
        self.known = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._clients.add(self)
        here, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self.peer = Peer(LOOPBACK, uid_of(peer, here))
        if not self._door.enter(self):
            self.abort()
            return
        loop = asyncio.get_running_loop()
        self._silence = loop.call_later(_SILENT_SECONDS, self._end_silence)

    def _end_silence(self) -> None:
        if not self.known:
            self.abort()

    def turn_out(self) -> None:
        self.abort()
        if self._other is not None:
            self._other.abort()

    def _received(self, data: bytes) -> None:
        if self._other is not None:
            super()._received(data)
            return
        self._greeting += data
        if self._connecting is not None:
            # Nobody says more before the server has answered.
            if len(self._greeting) > _LONGEST_GREETING:
                self.abort()
            return
        self._hear_greeting()

    def _hear_greeting(self) -> None:
        while True:
            verdict, size = judge(self._greeting)
            if verdict is Greeting.DECLINE_ENCRYPTION and self._declined < _MOST_DECLINED:
                self._declined += 1
                self._greeting = self._greeting[size:]
                self.write(b"N")
                continue
            break
        if verdict is Greeting.FORWARD:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        elif verdict is not Greeting.WAIT:
            self.write(refusal())
            self.close()

    async def _connect(self) -> None:
        """The server has nothing to do with a connection before something was said on it."""
        server = _Server(self)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: server, self._socket_path())
        except OSError:
            self.abort()
            return
        if self._transport is None or self._transport.is_closing():
            server.abort()
            return
        self._other = server
        server.write(self._greeting)
        self._greeting = b""

    def connection_lost(self, error: Exception | None) -> None:
        if self._silence is not None:
            self._silence.cancel()
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
        self._door.leave(self)
        self._clients.discard(self)
        super().connection_lost(error)


class _Server(_End):
    def __init__(self, client: _Client) -> None:
        super().__init__()
        self._other = client
        self._client = client
        self._login = b""

    def _received(self, data: bytes) -> None:
        if not self._client.known:
            self._login = (self._login + data)[-_LOGIN_BYTES:]
            if _LOGGED_IN in self._login:
                self._client.known = True
                self._login = b""
        super()._received(data)
