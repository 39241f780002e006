"""POST to a receiver that isn't trusted: to an address that was judged, with a deadline, and reading little.

A general HTTP client resolves names by itself, follows redirects, reads answers whole and bounds each wait instead
of the whole; here none of that may be. The status decides, so an answer counts when its head is complete; of the
body only as much is read as explains a refusal. Connections are kept for a short while: they lead to the address
that was judged when they were made.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import NamedTuple, cast

import httptools

from tracelake.delivery.addresses import Allowance, Blocked, ReceiverAddresses, ReceiverEndpoint
from tracelake.delivery.connect import NotSent, connect

MAX_BODY = 4 * 1024
MAX_HEAD = 16 * 1024
IDLE_SECONDS = 4.0
MAX_AGE_SECONDS = 60.0
_BODY_SECONDS = 1.0
_FINAL = 200


class ReceiverAnswer(NamedTuple):
    """``body`` is its beginning. Names of ``headers`` are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class TryUnanswered(Exception):
    """The request may have reached the receiver."""


class HttpPoster:
    def __init__(self, addresses: ReceiverAddresses, tls: ssl.SSLContext | None = None) -> None:
        self._addresses = addresses
        self._tls = tls or ssl.create_default_context()
        self._idle: dict[ReceiverEndpoint, list[_Connection]] = {}
        self._open: set[_Connection] = set()

    @property
    def allowance(self) -> Allowance:
        return self._addresses.allowance

    async def post(
        self, endpoint: ReceiverEndpoint, path: str, headers: Mapping[str, str], body: bytes, seconds: float
    ) -> ReceiverAnswer:
        """Raises ``Blocked``, ``NotSent`` or ``TryUnanswered``; ``seconds`` bounds everything together. Once
        anything was written, whatever fails is ``TryUnanswered``."""
        request = _request(endpoint, path, headers, body)
        began = False
        try:
            async with asyncio.timeout(seconds) as limit:
                kept = self._take(endpoint)
                if kept is not None:
                    began = True
                    try:
                        return await self._ask(endpoint, kept, request)
                    except _Closed:
                        # It was closed while it was idle, mostly: the same message goes again, under its id.
                        pass
                connection = await self._connect(endpoint, limit.when())
                began = True
                return await self._ask(endpoint, connection, request)
        except TimeoutError:
            what = f"no answer within {seconds:g} s"
            raise (TryUnanswered(what) if began else NotSent(f"no connection within {seconds:g} s")) from None
        except _Closed as error:
            raise TryUnanswered(str(error)) from None
        except (Blocked, NotSent) as error:
            if began:
                # The connection before this one may have ended after the receiver had read the request.
                raise TryUnanswered(f"a connection closed before an answer, then {error}") from None
            raise

    def close(self) -> None:
        for connection in tuple(self._open):
            connection.abort()

    async def _ask(
        self, endpoint: ReceiverEndpoint, connection: _Connection, request: bytes
    ) -> ReceiverAnswer:
        try:
            answer = await connection.ask(request)
        except BaseException:
            # Also when cancelled: its answer may still come, and would be read as the next one's.
            connection.abort()
            raise
        self._idle.setdefault(endpoint, []).append(connection)
        return answer

    def _take(self, endpoint: ReceiverEndpoint) -> _Connection | None:
        idle = self._idle.get(endpoint, [])
        while idle:
            # The one used last is the least likely to have been closed.
            connection = idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return None

    async def _connect(self, endpoint: ReceiverEndpoint, deadline: float | None) -> _Connection:
        loop = asyncio.get_running_loop()

        async def opened(address: str) -> _Connection:
            _, protocol = await loop.create_connection(
                lambda: _Connection(self._open),
                address,
                endpoint.port,
                ssl=self._tls if endpoint.is_tls else None,
                # The name, not the address: that is what the certificate is about.
                server_hostname=endpoint.host if endpoint.is_tls else None,
            )
            return protocol

        return await connect(self._addresses, endpoint, deadline, opened)


def _request(endpoint: ReceiverEndpoint, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nHost: {endpoint.authority}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    for name, value in headers.items():
        # A line break in a value would begin another header.
        if not f"{name}{value}".isprintable():
            raise ValueError(f"the header {name!r} can't be sent")
    return head.encode("latin-1") + body


class _Closed(Exception):
    """The connection ended before an answer."""


class _Connection(asyncio.Protocol):
    def __init__(self, opened: set[_Connection]) -> None:
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._awaited: asyncio.Future[ReceiverAnswer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._born = self._idle_since = self._loop.time()
        self._patience: asyncio.TimerHandle | None = None
        self._complete = True
        self._reset()

    def _reset(self) -> None:
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._received = 0
        self._has_head = False

    @property
    def is_usable(self) -> bool:
        now = self._loop.time()
        return (
            self._transport is not None
            and self._complete
            and now - self._idle_since < IDLE_SECONDS
            and now - self._born < MAX_AGE_SECONDS
        )

    async def ask(self, request: bytes) -> ReceiverAnswer:
        if self._transport is None:
            raise _Closed("the connection was closed")
        self._calm()
        self._reset()
        self._complete = False
        self._awaited = self._loop.create_future()
        self._transport.write(request)
        return await self._awaited

    def abort(self) -> None:
        if self._transport is not None:
            # Not close(), which would first send everything that is buffered.
            self._transport.abort()
        self._end("the connection was given up")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._opened.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._has_head:
            # A body without a length ends here.
            self._answer()
        self._end("the receiver closed the connection before it answered")

    def data_received(self, data: bytes) -> None:
        if self._complete:
            # Bytes that nobody asked for: out of step, or a trick with the next answer.
            self.abort()
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the answer is an upgrade to another protocol")
        except httptools.HttpParserError:
            self._fail("the answer isn't HTTP")
        # Headers that are being received count as well as those that are complete.
        if not self._has_head and not self._complete and self._received > MAX_HEAD:
            self._fail(f"the answer's head is longer than {MAX_HEAD} bytes")
        # The body's own bound doesn't see what is around it: sizes of chunks, their extensions, trailers.
        elif self._has_head and self._received > MAX_HEAD + MAX_BODY:
            self._enough()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head or self._complete:
            # Trailers explain nothing, and the answer was made of the head.
            return
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        # 100 Continue and the like: the answer itself follows.
        if status < _FINAL:
            self._headers = {}
            return
        self._has_head = True
        if status < 300:
            self._answer()
        # A refusal is explained by its body, if that comes soon.
        self._patience = self._loop.call_later(_BODY_SECONDS, self._enough)

    def on_body(self, part: bytes) -> None:
        self._body += part[: MAX_BODY - len(self._body)]
        if len(self._body) >= MAX_BODY:
            self._enough()

    def on_message_complete(self) -> None:
        if not self._has_head:
            return
        stays = self._parser.should_keep_alive()
        self._answer()
        self._calm()
        self._has_head = False
        self._complete = True
        self._idle_since = self._loop.time()
        if stays:
            self._patience = self._loop.call_later(IDLE_SECONDS, self.abort)
        else:
            self.abort()

    def _answer(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(
                ReceiverAnswer(self._parser.get_status_code(), self._headers, bytes(self._body))
            )

    def _enough(self) -> None:
        """The rest of the body isn't worth waiting for, nor is the connection."""
        self._answer()
        self.abort()

    def _fail(self, why: str) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(TryUnanswered(why))
        self.abort()

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _end(self, why: str) -> None:
        self._transport = None
        self._calm()
        self._opened.discard(self)
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(_Closed(why))
