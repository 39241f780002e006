"""HTTP/1.1 to the Dispatcher over kept connections, at the price of one system call each way.

A worker makes a call or two per task, and a general HTTP client costs more than a short task itself. ``_PlainLink``
speaks plain HTTP to one address; addresses that need TLS, a proxy or a password are left to ``httpx``, behind the
same methods, and so are downloads, which are rare and large. Nothing is repeated here: ``NoAnswer`` means that the
server may or may not have received the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import httptools
import httpx

CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 100
_IDLE_SECONDS = 5.0
"""Less than servers keep idle connections: a call on one that is being closed would be lost."""
_LENGTHS = (b"content-length", b"transfer-encoding")
_FINAL = 200
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class HttpResponse(NamedTuple):
    status: int
    body: bytes


class NoAnswer(Exception):
    """The server can't be reached, closed the connection or took too long."""


class HttpDownload:
    """A response whose body is read in parts; to be closed."""

    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self.status = answer.status_code

    async def parts(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._answer.aiter_bytes():
                yield part
        except httpx.TransportError as error:
            raise NoAnswer(str(error) or type(error).__name__) from None

    async def read(self) -> HttpResponse:
        return HttpResponse(self.status, b"".join([part async for part in self.parts()]))

    async def close(self) -> None:
        await self._answer.aclose()


class HttpLink(Protocol):
    async def request(
        self, method: str, path: str, body: bytes | None, *, seconds: float, headers: Mapping[str, str] | None
    ) -> HttpResponse: ...

    async def download(self, path: str, *, seconds: float) -> HttpDownload:
        """``seconds`` bounds the wait for each part."""
        ...

    async def close(self) -> None: ...


def open_link(url: str, headers: Mapping[str, str]) -> HttpLink:
    """``headers`` go with every call. Connects when it is first used."""
    parts = urlsplit(url)
    is_local = parts.hostname in _LOOPBACK
    # No proxy leads to this machine's own loopback.
    is_direct = is_local or not {"http", "all"} & getproxies().keys()
    if parts.scheme == "http" and parts.hostname and "@" not in parts.netloc and is_direct:
        return _PlainLink(url, parts.hostname, parts.port or 80, headers)
    return _GeneralLink(url, headers, trust_env=not is_local)


class _PlainLink:
    def __init__(self, url: str, host: str, port: int, headers: Mapping[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._port = port
        self._prefix = urlsplit(url).path.rstrip("/")
        self._headers = _lines({"Host": urlsplit(url).netloc, **headers})
        # Without the environment's proxies: this link is for an address that needs none.
        self._open_downloads = partial(_GeneralLink, url, headers, trust_env=False)
        self._downloads: _GeneralLink | None = None
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)

    async def request(
        self, method: str, path: str, body: bytes | None, *, seconds: float, headers: Mapping[str, str] | None
    ) -> HttpResponse:
        more = _lines(headers) if headers else ""
        content = body or b""
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{more}"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        async with self._places:
            connection = self._take_idle() or await self._connect(min(seconds, CONNECT_SECONDS))
            # The connection is given up with the call: a late answer must not be read as the next call's.
            patience = self._loop.call_later(seconds, connection.give_up, f"no answer in {seconds:g} s")
            try:
                return await connection.ask(head.encode("latin-1") + content)
            finally:
                patience.cancel()
                self._keep(connection)

    async def download(self, path: str, *, seconds: float) -> HttpDownload:
        if self._downloads is None:
            self._downloads = self._open_downloads()
        return await self._downloads.download(path, seconds=seconds)

    async def close(self) -> None:
        for connection in tuple(self._open):
            connection.give_up("the worker closed the connection")
        if self._downloads is not None:
            await self._downloads.close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            # The one used last is the least likely to have been closed by the server.
            connection = self._idle.pop()
            if connection.is_usable and self._loop.time() - connection.idle_since < _IDLE_SECONDS:
                return connection
            connection.give_up("it was idle for too long")
        return None

    def _keep(self, connection: _Connection) -> None:
        if connection.is_usable:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        else:
            connection.give_up("the call was given up")

    async def _connect(self, seconds: float) -> _Connection:
        try:
            async with asyncio.timeout(seconds):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self._open.discard), self._host, self._port
                )
        except TimeoutError:
            raise NoAnswer(f"no connection in {seconds:g} s") from None
        except OSError as error:
            raise NoAnswer(f"{type(error).__name__} {error}") from None
        self._open.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One call at a time. The parser calls the methods whose names begin with ``on``."""

    def __init__(self, forget: Callable[[_Connection], None]) -> None:
        self.idle_since = 0.0
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._awaited: asyncio.Future[HttpResponse] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._stays = True
        self.on_message_begin()

    @property
    def is_usable(self) -> bool:
        # A cancelled call leaves its future in place: its answer
        # may still come, so nothing else may be asked here.
        return self._transport is not None and self._awaited is None and self._stays

    async def ask(self, request: bytes) -> HttpResponse:
        if self._transport is None:
            raise NoAnswer("the connection was closed")
        self._awaited = self._loop.create_future()
        self._transport.write(request)
        return await self._awaited

    def give_up(self, why: str) -> None:
        if self._transport is not None:
            # Not close(), which would first send everything that is buffered.
            self._transport.abort()
        self._lost(why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        # A body without a declared length ends where the connection ends.
        if self._has_headers and not self._has_length and error is None:
            self.on_message_complete()
        self._lost("the connection was closed" if error is None else f"{type(error).__name__} {error}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.give_up(f"the answer isn't HTTP: {error}")

    def on_message_begin(self) -> None:
        self._parts: list[bytes] = []
        self._has_headers = False
        self._has_length = False

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in _LENGTHS:
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._has_headers = True

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        awaited, status = self._awaited, self._parser.get_status_code()
        # 100 Continue and the like: the answer itself follows.
        if status < _FINAL:
            return
        # A response without a request means that the peer is out of step: don't use the connection again.
        self._stays = awaited is not None and self._has_length and self._parser.should_keep_alive()
        self._awaited = None
        # Otherwise the end of the connection would complete this message a second time.
        self._has_headers = False
        if awaited is not None and not awaited.done():
            awaited.set_result(HttpResponse(status, b"".join(self._parts)))

    def _lost(self, why: str) -> None:
        self._transport = None
        self._forget(self)
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited.done():
            awaited.set_exception(NoAnswer(why))


class _GeneralLink:
    def __init__(self, url: str, headers: Mapping[str, str], *, trust_env: bool) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=20),
            trust_env=trust_env,
        )

    async def request(
        self, method: str, path: str, body: bytes | None, *, seconds: float, headers: Mapping[str, str] | None
    ) -> HttpResponse:
        limit = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        try:
            answer = await self._http.request(method, path, content=body, timeout=limit, headers=headers)
        except httpx.TransportError as error:
            raise NoAnswer(f"{type(error).__name__} {error}".strip()) from None
        return HttpResponse(answer.status_code, answer.content)

    async def download(self, path: str, *, seconds: float) -> HttpDownload:
        limit = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        request = self._http.build_request("GET", path, timeout=limit)
        try:
            return HttpDownload(await self._http.send(request, stream=True))
        except httpx.TransportError as error:
            raise NoAnswer(f"{type(error).__name__} {error}".strip()) from None

    async def close(self) -> None:
        await self._http.aclose()


def _lines(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        # A line break in a value would begin another header.
        if not f"{name}{value}".isprintable():
            raise ValueError(f"the header {name!r} can't be sent")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
