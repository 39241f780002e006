"""``PortRelay``: a loopback port for private clusters, which forwards connections to the cluster's socket within
limits.

A port of the server's own would be open to every user of the machine: a client that connects and sends nothing
takes one of the server's connections, before any password is asked for, and a program that listens there while the
server is down receives passwords. So the launcher holds the port (``HeldPort``) and forwards a connection once it
has received a startup packet that a driver would send. When there is no room for one more connection, a client
that hasn't logged in is disconnected, of the user who has most of them.

A server logs a bad startup packet before it asks for a password, in full length: 15 KB for each unauthenticated
connection. So only a small and plain packet reaches the server. A request for encryption is answered here, since
the server has none.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Callable
from enum import Enum
from typing import cast

from tracelake.serving.http_limits import ConnectionLimiter, HttpLimits, Peer
from tracelake.serving.local_sockets import LOOPBACK, HeldPort, uid_of_loopback_peer

CONNECTIONS = 160
"""Connections of the server that the relay may use; the rest is for clients of the socket."""
_LIMITS = HttpLimits(connections=CONNECTIONS, peer_connections=128)
_SILENT_SECONDS = 10.0
_BACKLOG = 256
_READ_BYTES = 64 * 1024
_UNSENT_BYTES = 256 * 1024
_MOST_DECLINED = 2
"""Once for each kind of encryption that a client may request."""
_LOGGED_IN = b"R\x00\x00\x00\x08\x00\x00\x00\x00"
"""``AuthenticationOk``, which the server sends once in a connection, before anything that a client could choose."""
_LOGIN_BYTES = 16 * 1024
LARGEST = 4096
# SSLRequest and GSSENCRequest, which have the place of a protocol version.
_ENCRYPTION = (80877103, 80877104)
_CANCEL = 80877102
# Since protocol 3.2 a cancel key has up to 256 bytes.
_CANCEL_BYTES = 12 + 256
_PROTOCOL = 3
_HEADER = struct.Struct("!II")
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_.]{0,62}")
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_LONGEST = {b"user": 63, b"database": 63}
_LONGEST_VALUE = 1024
# Our logins need no walsender connection, and the server logs a bad value of this setting as it came.
_REFUSED = (b"replication",)


_LONGEST_GREETING = 2 * LARGEST


class PortRelay:
    """A thread with an event loop, for as long as this process lives or until ``close``."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._clients: set[_Client] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="postgres-ports", daemon=True)
        self._thread.start()

    def serve(self, port: HeldPort, socket_path: Callable[[], str]) -> None:
        """``socket_path`` is called at each connection. A port that isn't held isn't served."""
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
            client.evict()
        # The loop closes their transports in its next turn.
        await asyncio.sleep(0)

    async def _serve(self, port: HeldPort, socket_path: Callable[[], str]) -> None:
        if port.socket is None:
            return
        # asyncio closes the socket that it serves; the port must stay held.
        listening = port.socket.dup()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door = ConnectionLimiter(_LIMITS)
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
    """One end of a connection; data that it receives is written to the other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._buffer = bytearray(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        # Allocated at the first read, so a silent client costs no buffer.
        if not self._buffer:
            self._buffer = bytearray(_READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        # Copied, since the buffer is filled again while the other end has yet to send this.
        self._received(bytes(memoryview(self._buffer)[:nbytes]))

    def _received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        # The slow end pauses the fast one; unsent data would grow without limit otherwise.
        if self._other is not None and self._other._transport is not None:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._other is not None:
            self._other.close()

    def close(self) -> None:
        """Close after pending data was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Client(_End):
    """A client of the port; ``known`` once the server has accepted its login."""

    def __init__(
        self, door: ConnectionLimiter, socket_path: Callable[[], str], clients: set[_Client]
    ) -> None:
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
        self.peer = Peer(LOOPBACK, uid_of_loopback_peer(peer, here))
        if not self._door.enter(self):
            self.abort()
            return
        loop = asyncio.get_running_loop()
        self._silence = loop.call_later(_SILENT_SECONDS, self._end_silence)

    def _end_silence(self) -> None:
        if not self.known:
            self.abort()

    def evict(self) -> None:
        self.abort()
        if self._other is not None:
            self._other.abort()

    def _received(self, data: bytes) -> None:
        if self._other is not None:
            super()._received(data)
            return
        self._greeting += data
        if self._connecting is not None:
            # A driver sends nothing more before the server has answered.
            if len(self._greeting) > _LONGEST_GREETING:
                self.abort()
            return
        self._read_greeting()

    def _read_greeting(self) -> None:
        while True:
            verdict, size = check_startup_packet(self._greeting)
            if verdict is StartupDecision.DECLINE_ENCRYPTION and self._declined < _MOST_DECLINED:
                self._declined += 1
                self._greeting = self._greeting[size:]
                self.write(b"N")
                continue
            break
        if verdict is StartupDecision.FORWARD:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        elif verdict is not StartupDecision.WAIT:
            self.write(refusal())
            self.close()

    async def _connect(self) -> None:
        """Connect to the server only now: a silent client must not take one of its connections."""
        server = _Server(self)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: server, self._socket_path())
        except OSError:
            self.abort()
            return
        # The client may have left while the connection was made.
        if self._transport is None or self._transport.is_closing():
            server.abort()
            return
        self._other = server
        # The greeting includes bytes that came during the connect, so none is lost or reordered.
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
            # The mark may be split over two reads.
            self._login = (self._login + data)[-_LOGIN_BYTES:]
            if _LOGGED_IN in self._login:
                self._client.known = True
                self._login = b""
        super()._received(data)


class StartupDecision(Enum):
    """The decision about the bytes received so far."""

    WAIT = "incomplete startup packet"
    DECLINE_ENCRYPTION = "answer N; the next startup packet follows"
    FORWARD = "forward to the server"
    REFUSE = "invalid startup packet"


def check_startup_packet(received: bytes) -> tuple[StartupDecision, int]:
    """The decision about the first message in ``received``, and its length."""
    if len(received) < 4:
        return StartupDecision.WAIT, 0
    size = int.from_bytes(received[:4], "big")
    if not _HEADER.size <= size <= LARGEST:
        return StartupDecision.REFUSE, 0
    if len(received) < size:
        return StartupDecision.WAIT, 0
    code = _HEADER.unpack_from(received)[1]
    if code in _ENCRYPTION:
        return (StartupDecision.DECLINE_ENCRYPTION if size == _HEADER.size else StartupDecision.REFUSE), size
    if code == _CANCEL:
        return (StartupDecision.FORWARD if size <= _CANCEL_BYTES else StartupDecision.REFUSE), size
    if code >> 16 != _PROTOCOL or not _is_plain(received[_HEADER.size : size]):
        return StartupDecision.REFUSE, size
    return StartupDecision.FORWARD, size


def _is_plain(parameters: bytes) -> bool:
    """Whether these are names and values, each with a zero behind it, and a zero behind all of them. Names are
    those of settings, which drivers send; a user is among them."""
    if parameters[-2:] != b"\0\0":
        return False
    parts = parameters[:-2].split(b"\0")
    if len(parts) % 2:
        return False
    given = dict(zip(parts[::2], parts[1::2], strict=True))
    return (
        # Of a repeated name only the last value is in ``given``; the server would see the others unchecked.
        len(given) == len(parts) // 2
        and b"user" in given
        and all(_is_plain_parameter(name, value) for name, value in given.items())
    )


def _is_plain_parameter(name: bytes, value: bytes) -> bool:
    return (
        _NAME.fullmatch(name) is not None
        and name.lower() not in _REFUSED
        and len(value) <= _LONGEST.get(name, _LONGEST_VALUE)
        and _CONTROL.search(value) is None
    )


def refusal() -> bytes:
    """An error as a server sends it."""
    fields = b"SFATAL\0VFATAL\0C08P01\0Mthe port takes no such startup packet\0\0"
    return b"E" + struct.pack("!I", 4 + len(fields)) + fields
