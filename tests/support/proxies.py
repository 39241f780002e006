"""TCP proxies: ``CuttingProxy`` in front of Postgres, ``Forwarder`` for an address that outlives its server.

``CuttingProxy`` reads the client's side of the protocol message by message, so that a test can choose where a
connection ends: before a message reaches the server (then it never happened), or after the server has answered
it and before the client receives the answer (then it happened and the client doesn't know). The second case, on
``COMMIT``, is the fault that retries must survive.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Self
from urllib.parse import urlsplit, urlunsplit

_SSL_REQUEST = 80877103
_READY_FOR_QUERY = b"Z"
_CHUNK = 65536


class Cut(Enum):
    """What becomes of a message: it arrives, never does, does and its answer is lost, or waits."""

    NONE = "none"
    BEFORE = "before"
    AFTER = "after"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """``kind`` is the protocol's letter; ``text`` is the statement of a simple query, else empty."""

    kind: str
    text: str = ""

    @property
    def is_commit(self) -> bool:
        return self.kind == "Q" and self.text == "COMMIT"

    @property
    def asks_for_answer(self) -> bool:
        """After these the server says when it is ready again."""
        return self.kind in ("Q", "S")


Policy = Callable[[ClientMessage], Cut]


def pass_all(message: ClientMessage) -> Cut:
    return Cut.NONE


class RandomCuts:
    """Cuts one message in ``one_in``, and one commit in ``commit_one_in``, on either side of its arrival."""

    def __init__(self, seed: int, *, one_in: int, commit_one_in: int) -> None:
        self._random = random.Random(seed)
        self._one_in = one_in
        self._commit_one_in = commit_one_in
        self.made: Counter[str] = Counter()

    def __call__(self, message: ClientMessage) -> Cut:
        if not message.asks_for_answer:
            return Cut.NONE
        odds = self._commit_one_in if message.is_commit else self._one_in
        if self._random.randrange(odds):
            return Cut.NONE
        cut = self._random.choice((Cut.BEFORE, Cut.AFTER))
        self.made[f"{cut.value} {'COMMIT' if message.is_commit else 'statement'}"] += 1
        return cut


@dataclass(slots=True, eq=False)
class _Link:
    """One client connection and its counterpart to the server."""

    client_reader: asyncio.StreamReader
    client: asyncio.StreamWriter
    server_reader: asyncio.StreamReader
    server: asyncio.StreamWriter
    swallow: bool = False
    frozen: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        for writer in (self.client, self.server):
            if not writer.is_closing():
                writer.transport.abort()


class CuttingProxy:
    """``async with CuttingProxy(dsn) as proxy: connect(proxy.dsn)``. Faults are switched freely."""

    def __init__(self, target_dsn: str) -> None:
        parts = urlsplit(target_dsn)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._parts = parts
        self._links: set[_Link] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listening: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.policy: Policy = pass_all
        self.refusing = False
        self.held = asyncio.Event()
        self._let_go = asyncio.Event()
        self.cuts = 0

    @property
    def dsn(self) -> str:
        assert self._listening is not None
        port = self._listening.sockets[0].getsockname()[1]
        credentials = self._parts.netloc.rpartition("@")[0]
        return urlunsplit(self._parts._replace(netloc=f"{credentials}@127.0.0.1:{port}"))

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._listening is not None
        self._listening.close()
        self.cut_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_all(self) -> int:
        """End every connection now, whatever it is in the middle of."""
        links = list(self._links)
        for link in links:
            link.close()
        self.cuts += len(links)
        return len(links)

    def freeze(self) -> int:
        """The present connections stay open for ever and carry nothing more: a peer that vanished. New ones
        work."""
        for link in self._links:
            link.frozen = True
        return len(self._links)

    def stall(self) -> None:
        """Connections stay open, new ones are accepted, and nothing comes through: a network gone dark."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def let_go(self) -> None:
        """Send on what was held."""
        self._let_go.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        if self.refusing:
            writer.transport.abort()
            return
        try:
            server_reader, server = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(reader, writer, server_reader, server)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._to_server(link))
                both.create_task(self._to_client(link))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            link.close()
            self._links.discard(link)

    async def _to_server(self, link: _Link) -> None:
        try:
            await self._startup(link)
            while True:
                kind = await link.client_reader.readexactly(1)
                length = await link.client_reader.readexactly(4)
                body = await link.client_reader.readexactly(int.from_bytes(length) - 4)
                await self._passage(link)
                text = body[:-1].decode(errors="replace") if kind == b"Q" else ""
                cut = self.policy(ClientMessage(kind.decode("latin-1"), text))
                if cut is Cut.HOLD:
                    self.held.set()
                    await self._let_go.wait()
                if cut is Cut.BEFORE:
                    break
                link.swallow = cut is Cut.AFTER
                link.server.write(kind + length + body)
                await link.server.drain()
                if cut is Cut.AFTER:
                    await link.answered.wait()
                    break
            self.cuts += 1
        finally:
            link.close()

    async def _passage(self, link: _Link) -> None:
        await self._flowing.wait()
        if link.frozen:
            await asyncio.Event().wait()

    async def _startup(self, link: _Link) -> None:
        while True:
            length = await link.client_reader.readexactly(4)
            body = await link.client_reader.readexactly(int.from_bytes(length) - 4)
            await self._flowing.wait()
            link.server.write(length + body)
            if int.from_bytes(body[:4]) != _SSL_REQUEST:
                return

    async def _to_client(self, link: _Link) -> None:
        """Bytes pass unread, until an answer must be lost: then they are read for its end, and dropped."""
        try:
            pending = b""
            while data := await link.server_reader.read(_CHUNK):
                await self._passage(link)
                if not link.swallow:
                    link.client.write(data)
                    await link.client.drain()
                    continue
                pending += data
                while len(pending) >= 5 and len(pending) > (size := int.from_bytes(pending[1:5])):
                    if pending[:1] == _READY_FOR_QUERY:
                        link.answered.set()
                    pending = pending[size + 1 :]
        finally:
            link.answered.set()
            link.close()


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
