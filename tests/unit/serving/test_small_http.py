"""The small server keeps to its limits between requests too, and gives up callers that don't read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import h11
import pytest

from tracelake.domain.errors import Forbidden, TooLarge
from tracelake.serving.small_http import ConnectionLimits, ServedConnection, ServedResponse, SmallHttpServer

LONG = ConnectionLimits(
    head_bytes=4096,
    first_seconds=60,
    idle_seconds=60,
    head_seconds=60,
    pause_seconds=60,
    parting_seconds=0.1,
)
GOOD = b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nok"


class Echo(ServedConnection):
    served = 0

    def check_head(self, head: h11.Request) -> None:
        if head.target == b"/refused":
            raise Forbidden("Refused", "by its head")

    def take_piece(self, already: int, more: int) -> None:
        if already + more > 1000:
            raise TooLarge("TooLarge", "too large")

    def over(self) -> None:
        self.served += 1

    async def answer(self, head: h11.Request, body: bytes) -> None:
        if head.target == b"/bug":
            raise RuntimeError("a bug")
        await self.send(ServedResponse(200, {}, body * (32 * 1024 * 1024 if head.target == b"/large" else 1)))


@contextlib.asynccontextmanager
async def served(limits: ConnectionLimits) -> AsyncIterator[tuple[int, list[Echo], list[int]]]:
    opened: list[Echo] = []
    failures: list[int] = []

    def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Echo:
        opened.append(Echo(reader, writer, limits))
        return opened[-1]

    server = SmallHttpServer(admit, lambda: failures.append(1))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await server.listen(listener)
    try:
        yield port, opened, failures
    finally:
        await server.close()


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


async def test_half_a_request_behind_a_whole_one_has_the_time_of_a_head() -> None:
    async with served(replace(LONG, head_seconds=0.1)) as (port, _, _):
        answer = await ask(port, GOOD + GOOD[:20])
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answer


async def test_an_idle_connection_ends_without_an_answer() -> None:
    async with served(replace(LONG, first_seconds=0.1)) as (port, _, _):
        assert await ask(port, b"") == b""
    async with served(replace(LONG, idle_seconds=0.1)) as (port, opened, _):
        assert (await ask(port, GOOD)).endswith(b"\r\n\r\nok")
        assert opened[0].served == 2


@pytest.mark.parametrize("limits", [replace(LONG, pause_seconds=0.1), replace(LONG, body_seconds=0.1)])
async def test_a_body_that_pauses_or_takes_too_long_is_late(limits: ConnectionLimits) -> None:
    async with served(limits) as (port, _, _):
        assert (await ask(port, GOOD[:-1])).startswith(b"HTTP/1.1 408")


async def test_a_request_refused_by_its_head_is_not_asked_for_its_body() -> None:
    head = b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    async with served(LONG) as (port, _, _):
        answer = await ask(port, head % b"/refused")
        assert answer.startswith(b"HTTP/1.1 403")
        assert b'"reason":"Refused"' in answer
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % b"/echo")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 \r\n\r\n"
        writer.close()


async def test_an_answer_that_nobody_reads_is_given_up() -> None:
    async with served(replace(LONG, unread_seconds=0.1)) as (port, opened, failures):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(GOOD.replace(b"/echo", b"/large"))
            async with asyncio.timeout(60):
                while not (opened and opened[0].writer.is_closing()):
                    await asyncio.sleep(0.02)
        assert failures == []


async def test_a_bug_is_one_answer_and_is_reported() -> None:
    async with served(LONG) as (port, opened, failures):
        answer = await ask(port, GOOD.replace(b"/echo", b"/bug"))
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"a bug" not in answer
        assert (failures, opened[0].served) == ([1], 1)
        closing = GOOD.replace(b"Host: h", b"Host: h\r\nConnection: close")
        assert (await ask(port, closing)).startswith(b"HTTP/1.1 200")


async def test_a_request_that_is_under_way_when_the_server_closes_is_answered() -> None:
    opened: list[Echo] = []

    def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Echo:
        opened.append(Echo(reader, writer, LONG))
        return opened[-1]

    server = SmallHttpServer(admit, lambda: None)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await server.listen(listener)
    idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = GOOD.replace(b"Host: h\r\n", b"Host: h\r\nConnection: close\r\n")
    writer.write(request[:-1])
    async with asyncio.timeout(10):
        while not any(each.in_request for each in opened):
            await asyncio.sleep(0)
        closing = asyncio.create_task(server.close(grace_seconds=60))
        await asyncio.sleep(0)
        writer.write(request[-1:])
        assert (await reader.read()).endswith(b"ok")
        assert await idle_reader.read() == b""
        await closing
    for each in (writer, idle_writer):
        each.close()
        await each.wait_closed()
