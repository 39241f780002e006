"""A small HTTP/1.1 server for few callers and short requests, with limits on everything that a caller sends.

``ServedConnection`` reads one request after another. Sizes are limited before anything is stored, a head by its
bytes, a body piece by piece; the time to send them is limited as well. Every request gets an answer, if one can
still be sent: a problem, if it is refused. Where the next request would begin isn't known after a refusal in the
middle of one, so the connection then ends, a moment later, so that the answer can still be read.

Who may call, and what a request may be, is up to the servers that are built on it: the gateway of a sandbox
(``sandbox.gateway_connection``), the invoke endpoint of an invoker (``worker.lambda_.invoke_server``) and the port
for monitoring (``serving.metrics_port``). They are subclasses: ``check_head`` refuses a request before its body is
read, ``take_piece`` limits a body, ``answer`` answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import h11

from tracelake.contracts.problem import PROBLEM_JSON, Problem, encode_problem, problem, problem_of
from tracelake.domain.errors import BadRequest, HeadTooLarge, MethodNotAllowed, RequestTimeout, TracelakeError
from tracelake.serving.http_limits import CUT_SECONDS, HttpLimits

PIECE = 64 * 1024
"""Bytes that are read at a time."""
_PARTING_BYTES = 16 * PIECE
"""Bytes that a refused caller may still send; an unauthenticated one gets no more of the server's time."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """``path`` is without its query; header names are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)

    def __repr__(self) -> str:
        # Headers carry tokens.
        return f"ServedRequest({self.method} {self.path})"


@dataclass(frozen=True, slots=True)
class ServedResponse:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def problem_response(found: Problem) -> ServedResponse:
    return ServedResponse(found.status, {"content-type": PROBLEM_JSON}, encode_problem(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """``first_seconds`` and ``idle_seconds``: time until the first byte of the first request, and of any other.
    ``head_seconds``: time for a head, from its first byte. ``pause_seconds``: maximum time without a further byte
    of a body; ``body_seconds``: time for a whole body. ``unread_seconds``: time for an answer that the caller
    doesn't read. After a refusal, ``parting_bytes`` are read for ``parting_seconds``."""

    head_bytes: int
    first_seconds: float
    idle_seconds: float
    head_seconds: float
    pause_seconds: float
    parting_seconds: float
    body_seconds: float = math.inf
    parting_bytes: float = math.inf
    unread_seconds: float | None = None


def connection_limits(limits: HttpLimits) -> ConnectionLimits:
    """For callers that send as soon as they have connected."""
    return ConnectionLimits(
        head_bytes=limits.head_bytes,
        first_seconds=limits.head_seconds,
        idle_seconds=limits.idle_seconds,
        head_seconds=limits.head_seconds,
        pause_seconds=limits.body_seconds,
        body_seconds=limits.body_seconds,
        unread_seconds=limits.body_seconds,
        parting_seconds=CUT_SECONDS,
        parting_bytes=_PARTING_BYTES,
    )


class HungUp(Exception):
    """The caller has closed the connection, or doesn't read its answers."""


class ServedConnection(ABC):
    failure: ClassVar[Problem] = problem(
        TracelakeError.status, "InternalError", "this failed; try again later"
    )
    """Answered when ``answer`` raises anything but an error of the platform."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: ConnectionLimits
    ) -> None:
        self.writer = writer
        self._reader = reader
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._is_first = True
        self._asked_for_head = False
        self._head_began: float | None = None
        self._body_began = 0.0

    @abstractmethod
    def check_head(self, head: h11.Request) -> None:
        """Refuse a request by raising, before its body is read."""

    @abstractmethod
    def take_piece(self, already: int, more: int) -> None:
        """Refuse a further piece of a body by raising, before it is stored."""

    @abstractmethod
    async def answer(self, head: h11.Request, body: bytes) -> None:
        """Send the answer to a request, or refuse it by raising."""

    @abstractmethod
    def over(self) -> None:
        """Called after each request, whether it was answered, refused or broken off."""

    @property
    def in_request(self) -> bool:
        return self._head_began is not None

    async def serve(self) -> None:
        """Serve until the caller closes the connection or sends something invalid. Raises what ``answer`` raised
        unexpectedly, after an answer of its own."""
        with contextlib.suppress(HungUp, ConnectionError):
            while await self._serve_one():
                self._http.start_next_cycle()
                self._is_first = False

    async def _serve_one(self) -> bool:
        """Serve one request; the result is whether the connection can take another."""
        try:
            request = await self._next_request()
            if request is None:
                return False
            await self.answer(*request)
        except TracelakeError as error:
            allowed = error.allowed if isinstance(error, MethodNotAllowed) else ""
            await self._refuse(problem_of(error), {"allow": allowed} if allowed else {})
        except (HungUp, ConnectionError):
            raise
        except Exception:
            await self._refuse(self.failure)
            raise
        finally:
            self.over()
        # Something is unsent or unread: where the next request begins isn't known.
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _refuse(self, found: Problem, headers: Mapping[str, str] | None = None) -> None:
        # An answer has begun, and a second head would be read as part of its body.
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        # After a request that broke the protocol h11 may refuse to answer.
        with contextlib.suppress(h11.LocalProtocolError):
            refusal = problem_response(found)
            await self.send(replace(refusal, headers={**refusal.headers, **(headers or {})}))
        if self._http.their_state is not h11.DONE:
            await self._let_answer_be_read()

    async def _let_answer_be_read(self) -> None:
        """Read on for a moment: closing at once would discard the answer before a caller that still sends has
        read it."""
        left = self._limits.parting_bytes
        with contextlib.suppress(TimeoutError, OSError, RuntimeError):
            self.writer.write_eof()
            async with asyncio.timeout(self._limits.parting_seconds):
                while left > 0 and (piece := await self._reader.read(PIECE)):
                    left -= len(piece)

    async def _next_request(self) -> tuple[h11.Request, bytes] | None:
        loop = asyncio.get_running_loop()
        head: h11.Request | None = None
        body = bytearray()
        self._asked_for_head = False
        # The next request's first bytes may have come with the last one: then its time runs already.
        self._head_began = loop.time() if self._http.trailing_data[0] else None
        while True:
            event = await self._next_event()
            match event:
                case h11.Request():
                    head = event
                    self._asked_for_head = head.method == b"HEAD"
                    self._body_began = loop.time()
                    if _size(head) > self._limits.head_bytes:
                        raise self._head_too_large()
                    self.check_head(head)
                case h11.Data():
                    self.take_piece(len(body), len(event.data))
                    body += event.data
                case h11.EndOfMessage() if head is not None:
                    return head, bytes(body)
                case _:
                    return None

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED] | None:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                if error.error_status_hint == HeadTooLarge.status:
                    raise self._head_too_large() from error
                raise BadRequest("BadRequest", f"this is no HTTP request: {error}") from error
            if event is not h11.NEED_DATA:
                return event
            # Only here, after `check_head`: a caller that is refused by its head isn't asked for a body.
            if self._http.they_are_waiting_for_100_continue:
                self._write(h11.InformationalResponse(status_code=100, headers=[]))
            piece = await self._read()
            if not piece and self._http.their_state is h11.IDLE:
                return None
            self._http.receive_data(piece)

    async def _read(self) -> bytes:
        """The next piece; an idle connection ends when its time is up."""
        in_body = self._http.their_state is h11.SEND_BODY
        try:
            async with asyncio.timeout_at(self._until(in_body)):
                piece = await self._reader.read(PIECE)
        except TimeoutError:
            # An idle connection ends without an answer, since no request waits for one.
            if self._head_began is None and not in_body:
                return b""
            raise RequestTimeout("RequestTimeout", "the request didn't come in time") from None
        except OSError as error:
            raise HungUp from error
        if self._head_began is None:
            self._head_began = asyncio.get_running_loop().time()
        return piece

    def _until(self, in_body: bool) -> float:
        now, limits = asyncio.get_running_loop().time(), self._limits
        if in_body:
            return min(now + limits.pause_seconds, self._body_began + limits.body_seconds)
        if self._head_began is not None:
            return self._head_began + limits.head_seconds
        return now + (limits.first_seconds if self._is_first else limits.idle_seconds)

    def _head_too_large(self) -> HeadTooLarge:
        return HeadTooLarge("HeadTooLarge", f"a request's head may have {self._limits.head_bytes} bytes")

    async def send(self, response: ServedResponse) -> None:
        headers = {**response.headers, "content-length": str(len(response.body))}
        body = b"" if self._asked_for_head else response.body
        self._write(_head(response.status, headers), h11.Data(data=body), h11.EndOfMessage())
        await self._drain()

    async def send_pieces(
        self, status: int, headers: Mapping[str, str], pieces: AsyncIterator[bytes]
    ) -> None:
        """Send in pieces, no faster than the caller reads them."""
        self._write(_head(status, headers))
        async for piece in pieces:
            self._write(h11.Data(data=piece))
            await self._drain()
        self._write(h11.EndOfMessage())
        await self._drain()

    def _write(self, *events: h11.Event) -> None:
        self.writer.write(b"".join(self._http.send(event) or b"" for event in events))

    async def _drain(self) -> None:
        """Wait until the caller has read enough of what was written."""
        try:
            async with asyncio.timeout(self._limits.unread_seconds):
                await self.writer.drain()
        except TimeoutError:
            # A close would wait for the caller to read the rest.
            self.writer.transport.abort()
            raise HungUp from None
        except OSError as error:
            raise HungUp from error


def _head(status: int, headers: Mapping[str, str]) -> h11.Response:
    lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return h11.Response(status_code=status, headers=lines)


def _size(head: h11.Request) -> int:
    # Four for the colon, the space and the end of the line.
    return len(head.target) + sum(len(name) + len(value) + 4 for name, value in head.headers)


class SmallHttpServer:
    """Accepts connections and serves each in a task of its own.

    ``admit`` makes the object of a new connection; None means that it has refused and closed it. ``failed`` is
    called while an unexpected exception of a connection is handled, to log it.
    """

    def __init__(
        self,
        admit: Callable[[asyncio.StreamReader, asyncio.StreamWriter], ServedConnection | None],
        failed: Callable[[], None],
    ) -> None:
        self._admit = admit
        self._failed = failed
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], ServedConnection] = {}

    def __len__(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    async def listen(self, at: Path | socket.socket) -> None:
        """Serve at a new socket file, or at a listening socket, which ``close`` closes."""
        if isinstance(at, Path):
            server = await asyncio.start_unix_server(self._accept, at, start_serving=False)
        else:
            start = asyncio.start_unix_server if at.family == socket.AF_UNIX else asyncio.start_server
            server = await start(self._accept, sock=at, start_serving=False)
        # Recorded before it serves, so that a caller that is cancelled here can close it.
        self._servers.append(server)
        await server.start_serving()

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Accept no more connections, and end those that are open. A request of which a byte has come is answered
        within ``grace_seconds``: its caller couldn't know what became of it."""
        for server in self._servers:
            server.close()
        asked = [task for task, connection in self._connections.items() if connection.in_request]
        if asked and grace_seconds:
            await asyncio.wait(asked, timeout=grace_seconds)
        open_now = dict(self._connections)
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)
        # Also for connections whose task hasn't begun to run.
        for connection in open_now.values():
            connection.writer.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._admit(reader, writer)
        if connection is None:
            return
        task = asyncio.create_task(self._serve(connection))
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)

    async def _serve(self, connection: ServedConnection) -> None:
        try:
            await connection.serve()
        except Exception:
            # No request may end the process, and an unexpected error must not be lost either.
            self._failed()
        finally:
            # The caller has often closed it already.
            with contextlib.suppress(OSError):
                connection.writer.close()
                await connection.writer.wait_closed()
