"""One keep-alive HTTP/1.1 connection with JSON bodies, one request at a time.

Bare on purpose: what the client costs is subtracted from the cores that the Dispatcher is measured on.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self
from urllib.parse import urlsplit

import orjson


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: str) -> None:
        self._reader = reader
        self._writer = writer
        self._headers = headers
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, url: str, **headers: str) -> Self:
        """``headers`` go with every request, underscores in their names for dashes."""
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
        lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
        return cls(reader, writer, f"Host: {parts.netloc}\r\n{''.join(lines)}")

    async def post(self, path: str, body: Any) -> Any:
        return await self._exchange("POST", path, body if isinstance(body, bytes) else orjson.dumps(body))

    async def get(self, path: str) -> Any:
        return await self._exchange("GET", path, b"")

    def close(self) -> None:
        self._writer.close()

    async def _exchange(self, method: str, path: str, content: bytes) -> Any:
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}Content-Length: {len(content)}\r\n\r\n"
        async with self._turn:
            self._writer.write(head.encode() + content)
            answer = await self._reader.readuntil(b"\r\n\r\n")
            status_line, *fields = answer.decode("latin-1").split("\r\n")
            length = next(
                int(field.split(":")[1]) for field in fields if field.lower().startswith("content-length:")
            )
            body = await self._reader.readexactly(length)
        if not 200 <= int(status_line.split(" ")[1]) < 300:
            raise RuntimeError(f"{method} {path}: {status_line}: {body.decode()}")
        return orjson.loads(body)
