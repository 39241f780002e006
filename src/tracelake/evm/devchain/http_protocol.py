"""HTTP/1.1 for JSON-RPC, one asyncio protocol per connection: keep-alive, pipelining, nothing else.

Requests of a connection are answered in their order and at once; while a client doesn't read its answers, no
more of its requests are read.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import cast

import httptools

from tracelake.evm.devchain.jsonrpc import Caller, Methods, respond

MAX_BODY = 16 * 1024 * 1024

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_REFUSED = (
    b"HTTP/1.1 %d %s\r\ncontent-type: text/plain\r\nallow: POST\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n"
)
_USAGE = b"This is a JSON-RPC endpoint: POST a request to it.\n"


class HttpProtocol(asyncio.Protocol):
    def __init__(self, methods: Methods, connections: set[asyncio.BaseTransport]) -> None:
        """``connections`` holds those that are open, for whoever ends the server."""
        self._methods = methods
        self._connections = connections
        self._caller = Caller(loopback=False)
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(transport)
        peer = transport.get_extra_info("peername")
        self._caller = Caller(loopback=peer is not None and ipaddress.ip_address(peer[0]).is_loopback)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(426, b"Upgrade Required", _USAGE)
        except httptools.HttpParserError:
            self._refuse(400, b"Bad Request", b"That is not HTTP.\n")

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def on_message_begin(self) -> None:
        self._body.clear()
        self._size = 0

    def on_body(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= MAX_BODY:
            self._body.append(part)

    def on_message_complete(self) -> None:
        if self._transport.is_closing():
            return
        if self._parser.get_method() != b"POST":
            self._refuse(405, b"Method Not Allowed", _USAGE)
        elif self._size > MAX_BODY:
            self._refuse(413, b"Content Too Large", b"At most %d bytes.\n" % MAX_BODY)
        else:
            answer = respond(b"".join(self._body), self._methods, self._caller)
            self._transport.write(b"".join((_OK % sum(map(len, answer)), *answer)))
            if not self._parser.should_keep_alive():
                self._transport.close()

    def _refuse(self, status: int, phrase: bytes, text: bytes) -> None:
        self._transport.write(_REFUSED % (status, phrase, len(text)) + text)
        self._transport.close()
