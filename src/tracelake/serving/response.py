"""Responses to HTTP requests, and the types of ASGI by which they are sent.

A route returns a ``Response``; the surface sends it. JSON is encoded once, by an encoder that writes UUIDs as
people know them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

JSON = b"application/json"
AsgiMessage = MutableMapping[str, Any]
AsgiScope = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]

_encode = msgspec.json.Encoder(uuid_format="canonical").encode


class Response:
    """A complete response body with its status."""

    __slots__ = ("body", "headers", "media_type", "status")

    def __init__(
        self,
        body: bytes,
        *,
        status: int = 200,
        media_type: bytes = JSON,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self.body = body
        self.status = status
        self.media_type = media_type
        self.headers = headers

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        headers = [
            (b"content-type", self.media_type),
            (b"content-length", str(len(self.body)).encode()),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class FileResponse(Response):
    """A body that is sent in pieces, of a length known in advance; if it ends early, the connection is cut."""

    __slots__ = ("length", "pieces")

    def __init__(self, pieces: AsyncIterator[bytes], length: int, media_type: bytes) -> None:
        super().__init__(b"", media_type=media_type)
        self.pieces = pieces
        self.length = length

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        headers = [(b"content-type", self.media_type), (b"content-length", str(self.length).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        async for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(value: Any, status: int = 200) -> Response:
    return Response(_encode(value), status=status)
