"""A small HTTP/1.1 server for few callers and short requests: one function answers them all.

Bounded in every direction: the size of a request, the time that a connection may take to say it, the number of
connections. What isn't HTTP is refused and the connection closed. Who calls is judged by the head, before a body is
read: until then a connection is a stranger's, and goes first when there is no room (``serving.http_limits``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import h11
import structlog

from tracelake.private_socket import uid_of
from tracelake.serving.http_limits import CUT_SECONDS, Door, HttpLimits, Peer, peer_of, refusal
from tracelake.worker.sandbox.gateway import GatewayResponse

MAX_CONNECTIONS = 256
BODY_SECONDS = 20.0
"""For a whole body."""
_CHUNK = 64 * 1024
_LAST_CHUNKS = 16
LIMITS = HttpLimits(connections=MAX_CONNECTIONS, peer_connections=MAX_CONNECTIONS, body_seconds=BODY_SECONDS)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """``path`` without its query; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


Handler = Callable[[HttpRequest], Awaitable[GatewayResponse]]
Admit = Callable[[HttpRequest], GatewayResponse | None]


class _Refused(Exception):
    """A request that isn't read to its end."""

    def __init__(self, answer: GatewayResponse) -> None:
        super().__init__(answer.status)
        self.answer = answer


class _Connection:
    """One caller, as the door sees it."""

    def __init__(self, writer: asyncio.StreamWriter, head_bytes: int) -> None:
        self.writer = writer
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes)
        self.known = False
        self.uid = uid_of(writer)
        addresses = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
        self.peer = peer_of(*addresses) if self.uid is None else Peer("local", self.uid)

    def turn_out(self) -> None:
        self.writer.transport.abort()


class HttpServer:
    """``admit`` sees each request without its body, and answers it if it may go no further."""

    def __init__(
        self, handler: Handler, *, max_body: int, admit: Admit | None = None, limits: HttpLimits = LIMITS
    ) -> None:
        self._handler = handler
        self._admit = admit
        self._max_body = max_body
        self._limits = limits
        self._door = Door(limits)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self, listener: socket.socket) -> None:
        """A listener that is a socket file's takes connections of its own user and of root alone."""
        start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        self._server = await start(self._accept, sock=listener, start_serving=False)
        await self._server.start_serving()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        open_now = dict(self._connections)
        for connection in open_now:
            connection.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)
        # Also those that had no time to begin.
        for writer in open_now.values():
            writer.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer, self._limits.head_bytes)
        if connection.uid not in (None, 0, os.getuid()):
            writer.transport.abort()
            return
        if not self._door.enter(connection):
            writer.write(refusal(503))
            writer.close()
            return
        task = asyncio.create_task(self._serve(connection, reader))
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)

    async def _serve(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        writer = connection.writer
        patience = self._limits.head_seconds
        try:
            while await self._one(connection, reader, patience):
                connection.http.start_next_cycle()
                patience = self._limits.idle_seconds
            if connection.http.their_state is not h11.DONE:
                await _let_answer_be_read(reader, writer)
        except (OSError, TimeoutError, EOFError):
            pass
        finally:
            self._door.leave(connection)
            with contextlib.suppress(OSError):
                writer.close()
                await writer.wait_closed()

    async def _one(self, connection: _Connection, reader: asyncio.StreamReader, patience: float) -> bool:
        """Whether the connection is good for another request."""
        try:
            request = await self._read(connection, reader, patience)
        except h11.RemoteProtocolError as error:
            answer = GatewayResponse(error.error_status_hint)
        except _Refused as refused:
            answer = refused.answer
        else:
            if request is None:
                return False
            answer = await self._answer(request)
        http, writer = connection.http, connection.writer
        headers = [*answer.headers.items(), ("Content-Length", str(len(answer.body)))]
        with contextlib.suppress(h11.LocalProtocolError):
            head = http.send(h11.Response(status_code=answer.status, headers=headers, reason=b""))
            writer.write(head or b"")
            body = http.send(h11.Data(data=answer.body))
            end = http.send(h11.EndOfMessage())
            writer.write((body or b"") + (end or b""))
        async with asyncio.timeout(self._limits.body_seconds):
            await writer.drain()
        return http.our_state is h11.DONE and http.their_state is h11.DONE

    async def _answer(self, request: HttpRequest) -> GatewayResponse:
        try:
            return await self._handler(request)
        except Exception:
            _log.exception("request_failed", path=request.path)
            return GatewayResponse(500)

    async def _read(
        self, connection: _Connection, reader: asyncio.StreamReader, patience: float
    ) -> HttpRequest | None:
        head: HttpRequest | None = None
        body = bytearray()
        http, loop = connection.http, asyncio.get_running_loop()
        async with _patient(patience, http) as limit:
            while True:
                event = http.next_event()
                match event:
                    case h11.NEED_DATA:
                        if http.they_are_waiting_for_100_continue:
                            go_on = h11.InformationalResponse(status_code=100, headers=[])
                            connection.writer.write(http.send(go_on) or b"")
                        began = head is not None or bool(http.trailing_data[0])
                        http.receive_data(await reader.read(_CHUNK))
                        if not began:
                            limit.reschedule(loop.time() + self._limits.head_seconds)
                    case h11.Request():
                        head = self._judged(event, connection)
                        limit.reschedule(loop.time() + self._limits.body_seconds)
                    case h11.Data(data=data):
                        body += data
                        if len(body) > self._max_body:
                            raise _Refused(GatewayResponse(413))
                    case h11.EndOfMessage():
                        assert head is not None
                        return HttpRequest(head.method, head.path, head.headers, bytes(body))
                    case _:
                        return None

    def _judged(self, event: h11.Request, connection: _Connection) -> HttpRequest:
        if len(event.target) + sum(len(name) + len(value) for name, value in event.headers) > (
            self._limits.head_bytes
        ):
            raise _Refused(GatewayResponse(431))
        head = HttpRequest(
            event.method.decode("ascii"),
            event.target.decode("latin-1").partition("?")[0],
            {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers},
        )
        if self._admit is not None and (answer := self._admit(head)) is not None:
            raise _Refused(answer)
        connection.known = True
        length = head.headers.get("content-length", "0")
        if len(length) > 18 or int(length) > self._max_body:
            raise _Refused(GatewayResponse(413))
        return head


@contextlib.asynccontextmanager
async def _patient(seconds: float, http: h11.Connection) -> AsyncIterator[asyncio.Timeout]:
    """A request that is only half here in time is answered; a caller who said nothing isn't."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError:
        if http.their_state is h11.IDLE and not http.trailing_data[0]:
            raise
        raise _Refused(GatewayResponse(408)) from None


async def _let_answer_be_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closing at once would take the answer away from a caller who still sends."""
    with contextlib.suppress(TimeoutError, RuntimeError):
        writer.write_eof()
        async with asyncio.timeout(CUT_SECONDS):
            for _ in range(_LAST_CHUNKS):
                if not await reader.read(_CHUNK):
                    return
