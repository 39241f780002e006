"""A TCP address that stays while what stands behind it comes and goes, for clients of a restarted server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit


class Forwarder:
    """``async with Forwarder(url) as way: call(way.url)``. Without a target, connections are refused."""

    def __init__(self, url: str) -> None:
        self._target: tuple[str, int] | None = None
        self._listening: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.lead_to(url)

    @property
    def url(self) -> str:
        assert self._listening is not None
        return f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    def lead_to(self, url: str | None) -> None:
        parts = urlsplit(url) if url is not None else None
        self._target = None if parts is None else (parts.hostname or "127.0.0.1", parts.port or 80)

    def cut(self) -> None:
        """End every connection, and refuse new ones."""
        self._target = None
        for task in self._passing:
            task.cancel()

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._listening is not None
        self._listening.close()
        self.cut()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._pass(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._target is None:
                return
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, far_writer))
                both.create_task(_copy(far_reader, writer))
        except* OSError:
            pass
        finally:
            for each in writers:
                each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(64 * 1024):
        writer.write(data)
        await writer.drain()
    with suppress(OSError, NotImplementedError):
        writer.write_eof()
