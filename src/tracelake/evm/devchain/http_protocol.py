"""HTTP/1.1 for JSON-RPC, one asyncio protocol per connection: keep-alive, pipelining, nothing else.

Requests of a connection are answered in their order and at once; while a client doesn't read its answers, no
more of its requests are read. Heads, bodies, the time for them and the number of connections are bounded as on
every listener of ours; nobody needs a credential here, so whoever has sent a request is known.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import deque
from dataclasses import dataclass
from typing import cast

import httptools

from tracelake.evm.devchain.jsonrpc import Caller, Methods, respond
from tracelake.serving.http_limits import CUT_SECONDS, Door, Peer, RequestMeter, peer_of, refusal

MAX_BODY = 16 * 1024 * 1024

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_REFUSED = (
    b"HTTP/1.1 %d %s\r\ncontent-type: text/plain\r\nallow: POST\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n"
)
_USAGE = b"This is a JSON-RPC endpoint: POST a request to it.\n"


@dataclass(frozen=True, slots=True)
class _Request:
    """``body`` is None when it was too large."""

    method: bytes
    body: bytes | None
    stays: bool


class HttpProtocol(asyncio.Protocol):
    def __init__(self, methods: Methods, connections: set[asyncio.BaseTransport], door: Door) -> None:
        """``connections`` holds those that are open, for whoever ends the server."""
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
        self._caller = Caller(loopback=False)
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._size = 0
        self._waiting: deque[_Request] = deque()
        self._is_unread = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(transport)
        peer = transport.get_extra_info("peername")
        self._caller = Caller(loopback=peer is not None and ipaddress.ip_address(peer[0]).is_loopback)
        self.peer = peer_of(peer, transport.get_extra_info("sockname"))
        if self._door.enter(self):
            self._since = asyncio.get_running_loop().time()
            self._wait(self._limits.head_seconds)
        else:
            self._end(refusal(503))

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._stop_waiting()
        self._door.leave(self)
        self._connections.discard(self._transport)

    def turn_out(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        was_half = self._meter.half
        left = memoryview(data)
        while left and not self._over:
            size = self._meter.room
            self._feed(left[:size])
            left = left[size:]
        if not self._over:
            self._stop_waiting()
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
                self._end(refusal(431))

    def _wait(self, seconds: float) -> None:
        """For the rest of a request, counted from its beginning, or for the next one."""
        self._timer = asyncio.get_running_loop().call_at(self._since + seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> None:
        if self._meter.half:
            self._end(refusal(408))
        else:
            self._transport.abort()

    def _end(self, answer: bytes) -> None:
        """Read no more, and cut the connection when the answer could be read."""
        self._over = True
        self._waiting.clear()
        self._stop_waiting()
        self._transport.write(answer)
        self._transport.pause_reading()
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
        """As far as answers are read: requests that came in one piece may ask for more than there is memory."""
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
