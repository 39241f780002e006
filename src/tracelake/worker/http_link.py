"""HTTP/1.1 to the Dispatcher over connections that are kept, at the price of a system call each way.

A worker makes a call or two per task, and a general client costs more than the task itself. This one speaks
plain HTTP to one address. Whatever else an address may ask for, TLS, a proxy, a password, is left to ``httpx``,
behind the same two methods. Nothing is repeated here: a call without an answer is ``NoAnswer``, and may have been
heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import httptools
import httpx

CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 100
_IDLE_SECONDS = 5.0
"""Less than any server waits: a connection that it is about to close would lose a call."""
_LENGTHS = (b"content-length", b"transfer-encoding")
_FINAL = 200
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class HttpAnswer(NamedTuple):
    status: int
    body: bytes


class NoAnswer(Exception):
    """Nobody was there, or hung up, or took too long."""


class HttpLink(Protocol):
    async def request(
        self, method: str, path: str, body: bytes | None, *, seconds: float, headers: Mapping[str, str] | None
    ) -> HttpAnswer: ...

    async def close(self) -> None: ...


def open_link(url: str, headers: Mapping[str, str]) -> HttpLink:
    """``headers`` go with every call. Connects when it is first used."""
    parts = urlsplit(url)
    is_local = parts.hostname in _LOOPBACK
    is_direct = is_local or not {"http", "all"} & getproxies().keys()
    if parts.scheme == "http" and parts.hostname and "@" not in parts.netloc and is_direct:
        return _PlainLink(parts.hostname, parts.port or 80, parts.netloc, parts.path.rstrip("/"), headers)
    return _GeneralLink(url, headers, trust_env=not is_local)


class _PlainLink:
    def __init__(self, host: str, port: int, name: str, prefix: str, headers: Mapping[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._port = port
        self._prefix = prefix
        self._headers = _lines({"Host": name, **headers})
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)

    async def request(
        self, method: str, path: str, body: bytes | None, *, seconds: float, headers: Mapping[str, str] | None
    ) -> HttpAnswer:
        more = _lines(headers) if headers else ""
        content = body or b""
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{more}"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        async with self._places:
            connection = self._take_idle() or await self._connect(min(seconds, CONNECT_SECONDS))
            patience = self._loop.call_later(seconds, connection.give_up, f"no answer in {seconds:g} s")
            try:
                return await connection.ask(head.encode("latin-1") + content)
            finally:
                patience.cancel()
                self._keep(connection)

    async def close(self) -> None:
        for connection in tuple(self._open):
            connection.give_up("the worker hung up")

    def _take_idle(self) -> _Connection | None:
        while self._idle:
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
        self._awaited: asyncio.Future[HttpAnswer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._stays = True
        self.on_message_begin()

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and self._awaited is None and self._stays

    async def ask(self, request: bytes) -> HttpAnswer:
        if self._transport is None:
            raise NoAnswer("the connection was closed")
        self._awaited = self._loop.create_future()
        self._transport.write(request)
        return await self._awaited

    def give_up(self, why: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._lost(why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._has_headers and not self._has_length and error is None:
            self.on_message_complete()
        self._lost("the connection was closed" if error is None else f"{type(error).__name__} {error}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.give_up(f"what came is no HTTP: {error}")

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
        if status < _FINAL:
            return
        # Whoever answers unasked is not to be asked again.
        self._stays = awaited is not None and self._has_length and self._parser.should_keep_alive()
        self._awaited = None
        self._has_headers = False
        if awaited is not None and not awaited.done():
            awaited.set_result(HttpAnswer(status, b"".join(self._parts)))

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
    ) -> HttpAnswer:
        limit = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        try:
            answer = await self._http.request(method, path, content=body, timeout=limit, headers=headers)
        except httpx.TransportError as error:
            raise NoAnswer(f"{type(error).__name__} {error}".strip()) from None
        return HttpAnswer(answer.status_code, answer.content)

    async def close(self) -> None:
        await self._http.aclose()


def _lines(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        if not f"{name}{value}".isprintable():
            raise ValueError(f"the header {name!r} can't be sent")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
