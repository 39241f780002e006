"""The worker's own HTTP: every way in which a server may end an answer, and every way in which none comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tracelake.leases.http_link import HttpLink, HttpResponse, NoAnswer, open_link

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def link_to(serve: Serve) -> AsyncIterator[HttpLink]:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = open_link(f"http://127.0.0.1:{port}", {"X-Who": "worker"})
    try:
        yield link
    finally:
        await link.close()
        server.close()


async def ask(link: HttpLink, seconds: float = 30) -> HttpResponse:
    return await link.request("POST", "/call", b"{}", seconds=seconds, headers=None)


def answering(*parts: bytes, times: int = 1) -> Serve:
    """Reads a call and sends the parts, then hangs up after so many calls."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(times):
            await reader.readuntil(b"\r\n\r\n{}")
            for part in parts:
                writer.write(part)
                await writer.drain()

    return serve


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",), id="length"),
        pytest.param((b"HTTP/1.1 200 OK\r\nContent-", b"Length: 5\r\n\r\nhel", b"lo"), id="in pieces"),
        pytest.param(
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"),
            id="chunked",
        ),
        pytest.param((b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhel", b"lo"), id="until it hangs up"),
        pytest.param(
            (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
            id="after an interim answer",
        ),
    ],
)
async def test_an_answer_is_whole_however_it_is_framed(parts: tuple[bytes, ...]) -> None:
    async with link_to(answering(*parts)) as link:
        assert await ask(link) == HttpResponse(200, b"hello")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        pytest.param((), "closed", id="nothing"),
        pytest.param((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",), "closed", id="cut short"),
        pytest.param((b"HTTP/1.1 200 OK\r\nContent-Le",), "closed", id="cut in the head"),
        pytest.param((b"SSH-2.0-OpenSSH_9.2\r\n",), "isn't HTTP", id="another protocol"),
    ],
)
async def test_what_is_not_a_whole_answer_is_none(parts: tuple[bytes, ...], why: str) -> None:
    async with link_to(answering(*parts)) as link:
        with pytest.raises(NoAnswer, match=why):
            await ask(link)


async def test_a_connection_serves_call_after_call() -> None:
    peers: set[object] = set()
    inner = answering(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", times=3)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.add(writer.get_extra_info("peername"))
        await inner(reader, writer)

    async with link_to(serve) as link:
        assert [(await ask(link)).status for _ in range(3)] == [204, 204, 204]
    assert len(peers) == 1


async def test_a_connection_that_the_server_closed_meanwhile_is_not_used_again() -> None:
    async with link_to(
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    ) as link:
        assert [(await ask(link)).status for _ in range(2)] == [200, 200]


async def test_a_server_that_says_nothing_is_given_up_and_its_late_answer_is_nobody_s() -> None:
    hung_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        await reader.read()
        hung_up.set()

    async with link_to(serve) as link:
        with pytest.raises(NoAnswer, match=r"no answer in 0\.05 s"):
            await ask(link, seconds=0.05)
        await asyncio.wait_for(hung_up.wait(), 30)


async def test_nobody_there_is_no_answer() -> None:
    async with link_to(answering()) as link:
        pass
    with pytest.raises(NoAnswer):
        await ask(link)
