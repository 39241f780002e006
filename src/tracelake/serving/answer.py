"""Responses: encoded once, sent as they are.

Routes answer with an ASGI response of our own; the framework's response classes build headers and cookies
for every request, which the claim path would pay for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar.types import Receive, Scope, Send

JSON = b"application/json"
_encode = msgspec.json.Encoder(uuid_format="canonical").encode


class Answer:
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self.media_type),
            (b"content-length", str(len(self.body)).encode()),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class FileAnswer(Answer):
    """A body that comes in pieces, of a length known before; if it ends early, the connection is cut."""

    __slots__ = ("length", "pieces")

    def __init__(self, pieces: AsyncIterator[bytes], length: int, media_type: bytes) -> None:
        super().__init__(b"", media_type=media_type)
        self.pieces = pieces
        self.length = length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", self.media_type), (b"content-length", str(self.length).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        async for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(_encode(value), status=status)
