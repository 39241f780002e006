"""A small HTTP/1.1 server for few callers and short requests: one function answers them all.

Bounded in every direction: the size of a request, the time that a connection may take to say it, the number of
connections. What isn't HTTP is refused and the connection closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import h11
import structlog

from tracelake.worker.sandbox.gateway import GatewayResponse

MAX_CONNECTIONS = 256
IDLE_SECONDS = 75.0
REQUEST_SECONDS = 20.0
_CHUNK = 64 * 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """``path`` without its query; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Handler = Callable[[HttpRequest], Awaitable[GatewayResponse]]


class _TooLarge(Exception):
    pass


class HttpServer:
    def __init__(self, handler: Handler, *, max_body: int) -> None:
        self._handler = handler
        self._max_body = max_body
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener, start_serving=False)
        await self._server.start_serving()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            while await self._one(connection, reader, writer):
                connection.start_next_cycle()
        except (OSError, TimeoutError, EOFError):
            pass
        finally:
            with contextlib.suppress(OSError):
                writer.close()
                await writer.wait_closed()

    async def _one(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection is good for another request."""
        try:
            request = await self._read(connection, reader)
        except h11.RemoteProtocolError as error:
            answer = GatewayResponse(error.error_status_hint)
        except _TooLarge:
            answer = GatewayResponse(413)
        else:
            if request is None:
                return False
            answer = await self._answer(request)
        headers = [*answer.headers.items(), ("Content-Length", str(len(answer.body)))]
        with contextlib.suppress(h11.LocalProtocolError):
            head = connection.send(h11.Response(status_code=answer.status, headers=headers, reason=b""))
            body = connection.send(h11.Data(data=answer.body))
            end = connection.send(h11.EndOfMessage())
            writer.write((head or b"") + (body or b"") + (end or b""))
            await writer.drain()
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    async def _answer(self, request: HttpRequest) -> GatewayResponse:
        try:
            return await self._handler(request)
        except Exception:
            _log.exception("request_failed", path=request.path)
            return GatewayResponse(500)

    async def _read(self, connection: h11.Connection, reader: asyncio.StreamReader) -> HttpRequest | None:
        head: h11.Request | None = None
        body = bytearray()
        async with asyncio.timeout(IDLE_SECONDS) as patience:
            while True:
                event = connection.next_event()
                match event:
                    case h11.NEED_DATA:
                        connection.receive_data(await reader.read(_CHUNK))
                    case h11.Request():
                        head = event
                        patience.reschedule(asyncio.get_running_loop().time() + REQUEST_SECONDS)
                    case h11.Data(data=data):
                        body += data
                        if len(body) > self._max_body:
                            raise _TooLarge
                    case h11.EndOfMessage():
                        assert head is not None
                        return _request(head, bytes(body))
                    case _:
                        return None


def _request(head: h11.Request, body: bytes) -> HttpRequest:
    return HttpRequest(
        head.method.decode("ascii"),
        head.target.decode("latin-1").partition("?")[0],
        {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers},
        body,
    )
