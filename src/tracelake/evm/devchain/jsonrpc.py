"""JSON-RPC 2.0 over HTTP/1.1: ``respond`` for single calls and batches, ``HttpProtocol`` for one connection.

Results are JSON that is encoded already, so a server of blocks never encodes the same block twice. A connection
is an asyncio protocol with keep-alive and pipelining: requests are answered in their order and at once, and
while a client doesn't read its answers, no more of its requests are read. Heads, bodies, their time and the
number of connections are bounded as on every listener of ours; no credential is needed here, so a client counts
as known after its first request.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import httptools
import orjson
import structlog

from tracelake.serving.http_limits import (
    CUT_SECONDS,
    HEAD_TOO_LARGE,
    LATE,
    NO_ROOM,
    ConnectionLimiter,
    Peer,
    RequestMeter,
    peer_of,
)

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
SERVER_ERROR = -32000
MOST_CALLS = 1_000
MOST_ANSWER_BYTES = 64 * 1024 * 1024
"""Maximum size of the answer to a batch."""
NULL = b"null"
_HEAD = b'{"jsonrpc":"2.0","id":'
_RESULT = b',"result":'
JsonBytes: TypeAlias = bytes | memoryview
MAX_BODY = 16 * 1024 * 1024
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_REFUSED = (
    b"HTTP/1.1 %d %s\r\ncontent-type: text/plain\r\nallow: POST\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n"
)
_USAGE = b"This is a JSON-RPC endpoint: POST a request to it.\n"

_log = structlog.get_logger()


class RpcError(Exception):
    """A JSON-RPC error with one of the standard's codes."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class RpcCaller:
    """The client of a call, as far as its connection identifies it."""

    loopback: bool


class RpcMethods(Protocol):
    """The methods that a server answers."""

    def call(self, method: str, params: list[Any], caller: RpcCaller) -> JsonBytes:
        """Return the result as JSON, or raise ``RpcError``."""


def respond(body: bytes, methods: RpcMethods, caller: RpcCaller) -> list[JsonBytes]:
    """The response to a request's body, in parts; no parts for a notification."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _error(NULL, RpcError(PARSE_ERROR, "parse error"))
    if not isinstance(request, list):
        return _one(request, methods, caller)
    if not request:
        return _error(NULL, RpcError(INVALID_REQUEST, "empty batch"))
    if len(request) > MOST_CALLS:
        return _error(NULL, RpcError(SERVER_ERROR, f"a batch has at most {MOST_CALLS} calls"))
    parts: list[JsonBytes] = []
    size = 0
    for each in request:
        if answer := _one(each, methods, caller):
            parts.append(b"," if parts else b"[")
            parts += answer
            size += sum(map(len, answer))
            # Checked while the answer grows: a small batch may ask for more than the memory.
            if size > MOST_ANSWER_BYTES:
                return _error(
                    NULL, RpcError(SERVER_ERROR, f"the answer is larger than {MOST_ANSWER_BYTES} bytes")
                )
    if parts:
        parts.append(b"]")
    return parts


def _one(request: Any, methods: RpcMethods, caller: RpcCaller) -> list[JsonBytes]:
    if not isinstance(request, dict) or not isinstance(request.get("method"), str):
        return _error(NULL, RpcError(INVALID_REQUEST, "invalid request"))
    params = request.get("params")
    number = _id(request)
    answer: list[JsonBytes]
    try:
        if params is None:
            params = []
        elif not isinstance(params, list):
            raise RpcError(INVALID_PARAMS, "params must be an array")
        answer = [_HEAD, number, _RESULT, methods.call(request["method"], params, caller), b"}"]
    except RpcError as error:
        answer = _error(number, error)
    except Exception:
        _log.exception("a call failed", method=request["method"])
        answer = _error(number, RpcError(INTERNAL_ERROR, "internal error"))
    return answer if "id" in request else []


def _id(request: dict[str, Any]) -> bytes:
    given = request.get("id")
    # ``type``, since true is an ``int`` and must come back as true.
    return b"%d" % given if type(given) is int else orjson.dumps(given)


def _error(number: bytes, error: RpcError) -> list[JsonBytes]:
    encoded = orjson.dumps({"code": error.code, "message": error.message})
    return [_HEAD, number, b',"error":', encoded, b"}"]


@dataclass(frozen=True, slots=True)
class _Request:
    """``body`` is None if it was too large."""

    method: bytes
    body: bytes | None
    stays: bool


class HttpProtocol(asyncio.Protocol):
    def __init__(
        self, methods: RpcMethods, connections: set[asyncio.BaseTransport], door: ConnectionLimiter
    ) -> None:
        """``connections`` is the set of open ones, which ending the server closes."""
        self.peer = Peer("")
        self.known = False
        self._methods = methods
        self._door = door
        self._limits = door.limits
        self._meter = RequestMeter(door.limits.head_bytes)
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._connections = connections
        self._caller = RpcCaller(loopback=False)
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._size = 0
        self._waiting: deque[_Request] = deque()
        self._is_unread = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(transport)
        peer = transport.get_extra_info("peername")
        self._caller = RpcCaller(loopback=peer is not None and ipaddress.ip_address(peer[0]).is_loopback)
        self.peer = peer_of(peer, transport.get_extra_info("sockname"))
        if self._door.enter(self):
            self._since = asyncio.get_running_loop().time()
            self._wait(self._limits.head_seconds)
        else:
            self._end(NO_ROOM)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._stop_waiting()
        self._door.leave(self)
        self._connections.discard(self._transport)

    def evict(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        was_half = self._meter.half
        left = memoryview(data)
        # In pieces of the head's room: a limit is noticed before the parser has read beyond it.
        while left and not self._over:
            size = self._meter.room
            self._feed(left[:size])
            left = left[size:]
        if not self._over:
            self._stop_waiting()
            # The time of a request counts from its beginning: a byte now and then must not extend it.
            if not (was_half and self._meter.half):
                self._since = asyncio.get_running_loop().time()
            seconds = self._limits.body_seconds if self._meter.in_body else self._limits.head_seconds
            self._wait(seconds if self._meter.half else self._limits.idle_seconds)

    def _feed(self, piece: memoryview) -> None:
        in_body = self._meter.in_body
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._refuse(426, b"Upgrade Required", _USAGE)
        except httptools.HttpParserError:
            self._refuse(400, b"Bad Request", b"That is not HTTP.\n")
        else:
            self._meter.fed(len(piece), in_body)
            if self._meter.too_large:
                self._end(HEAD_TOO_LARGE)

    def _wait(self, seconds: float) -> None:
        """Limit the time for the rest of a request, counted from its beginning, or for the next request."""
        self._timer = asyncio.get_running_loop().call_at(self._since + seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> None:
        if self._meter.half:
            self._end(LATE)
        else:
            self._transport.abort()

    def _end(self, answer: bytes) -> None:
        """Stop reading, and cut the connection after the client had time to read the answer."""
        self._over = True
        self._waiting.clear()
        self._stop_waiting()
        self._transport.write(answer)
        self._transport.pause_reading()
        # The client reads the answer and an end; a reset could discard the answer before it is read.
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(CUT_SECONDS, self._transport.abort)

    def pause_writing(self) -> None:
        self._is_unread = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_unread = False
        self._answer_waiting()
        if not (self._waiting or self._over):
            self._transport.resume_reading()

    def on_message_begin(self) -> None:
        self._body.clear()
        self._size = 0

    def on_headers_complete(self) -> None:
        self._meter.headers_complete()

    def on_body(self, part: bytes) -> None:
        self._meter.body(len(part))
        self._size += len(part)
        # A body that is too large is read on without being kept, so that the client gets an answer.
        if self._size <= MAX_BODY:
            self._body.append(part)

    def on_message_complete(self) -> None:
        self._meter.message_complete()
        self.known = True
        self._waiting.append(
            _Request(
                method=self._parser.get_method(),
                body=None if self._size > MAX_BODY else b"".join(self._body),
                stays=self._parser.should_keep_alive(),
            )
        )
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        """Answer as long as the client reads: the answers to pipelined requests may exceed the memory."""
        while self._waiting and not self._is_unread and not self._transport.is_closing():
            self._answer(self._waiting.popleft())

    def _answer(self, request: _Request) -> None:
        if request.method != b"POST":
            self._refuse(405, b"Method Not Allowed", _USAGE)
        elif request.body is None:
            self._refuse(413, b"Content Too Large", b"At most %d bytes.\n" % MAX_BODY)
        else:
            answer = respond(request.body, self._methods, self._caller)
            self._transport.write(b"".join((_OK % sum(map(len, answer)), *answer)))
            if not request.stays:
                self._transport.close()

    def _refuse(self, status: int, phrase: bytes, text: bytes) -> None:
        self._over = True
        self._transport.write(_REFUSED % (status, phrase, len(text)) + text)
        self._transport.close()
