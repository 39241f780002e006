"""An invoker that does as it is told: it speaks real HTTP, takes tasks or not, and remembers what it was asked.

What a test scripts are answers, in order; when the script is over, ``then`` is the answer to everything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from tracelake.contracts.bundles import Invocation

Answer = int | Literal["lose", "hang", "cut"]
"""A status; or the request is taken and the connection cut, or never answered; or cut before it is asked for."""


class ScriptedInvoker:
    def __init__(
        self, script: Iterable[Answer] = (), *, then: Answer = 202, token: str | None = None
    ) -> None:
        self.then = then
        self.token = token
        self.asked: list[Invocation] = []
        self.functions: list[str] = []
        self.taken: list[Invocation] = []
        self.at_once = 0
        self.most_at_once = 0
        self.changed = asyncio.Condition()
        self._script = iter(script)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def attempts_taken(self) -> Counter[tuple[str, int]]:
        """How often each attempt was, or may have been, taken."""
        return Counter((str(each.task_id), each.attempt) for each in self.taken)

    async def start(self) -> None:
        """On the port that it had before, if it had one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def until_taken(self, count: int, patience: float = 20.0) -> list[Invocation]:
        async with asyncio.timeout(patience), self.changed:
            await self.changed.wait_for(lambda: len(self.taken) >= count)
        return self.taken

    async def until_asked(self, count: int, patience: float = 20.0) -> list[Invocation]:
        async with asyncio.timeout(patience), self.changed:
            await self.changed.wait_for(lambda: len(self.asked) >= count)
        return self.asked

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = await self._read(reader, writer)
            if answer == "hang":
                await reader.read()
            elif answer not in ("lose", "cut"):
                body = b"{}"
                head = f"HTTP/1.1 {answer} Said\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.at_once -= 1
            self._open.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert headers["expect"] == "100-continue"
        if self.then == "cut":
            return "cut"
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers["content-length"]))
        if self.token is not None and headers["x-trace-worker-token"] != self.token:
            return 401
        assert headers["x-amz-invocation-type"] == "Event"
        invocation = msgspec.json.decode(body, type=Invocation)
        answer = next(self._script, self.then)
        async with self.changed:
            self.asked.append(invocation)
            self.functions.append(request.split("/")[3])
            if answer in (200, 202, 500, "lose", "hang"):
                self.taken.append(invocation)
            self.changed.notify_all()
        return answer


@asynccontextmanager
async def scripted_invoker(
    *script: Answer, then: Answer = 202, token: str | None = None
) -> AsyncIterator[ScriptedInvoker]:
    invoker = ScriptedInvoker(script, then=then, token=token)
    await invoker.start()
    try:
        yield invoker
    finally:
        await invoker.stop()
