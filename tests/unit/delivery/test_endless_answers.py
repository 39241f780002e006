"""Answers that never end: only their beginning is read, and the head decides what is recorded."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tracelake.delivery.addresses import Allowance, ReceiverAddresses, read_url
from tracelake.delivery.http_post import MAX_BODY, HttpPoster, ReceiverAnswer

CHUNKED = b"HTTP/1.1 %d X\r\nRetry-After: 7\r\nTransfer-Encoding: chunked\r\n\r\n"
ENOUGH = 64 * 1024 * 1024


@asynccontextmanager
async def answering(head: bytes, piece: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that repeats the piece after the head; gives its address and what it could send."""
    sent: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        count = 0
        with suppress(OSError):
            while count < ENOUGH:
                writer.write(piece)
                await writer.drain()
                count += len(piece)
        sent.append(count)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", sent


async def posted(url: str) -> ReceiverAnswer:
    allowance = Allowance.parse("127.0.0.1")
    poster = HttpPoster(ReceiverAddresses(allowance), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    endpoint, path = read_url(url, ("http",), allowance)
    try:
        return await poster.post(endpoint, path, {}, b"{}", 30)
    finally:
        poster.close()


@pytest.mark.parametrize("status", [500, 200])
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\n", b"retry-after: 9999\r\nx: " + b"v" * 60_000 + b"\r\n"),
        (b"0\r\nx: ", b"v" * 65_536),
        (b"5;a=", b"v" * 65_536),
        (b"", b"1\r\nv\r\n" * 10_000),
        (b"100000000\r\n", b"v" * 65_536),
    ],
    ids=["trailers", "one trailer", "an extension", "small chunks", "a body"],
)
async def test_after_the_head_little_is_read_and_nothing_changes_it(
    status: int, begin: bytes, piece: bytes
) -> None:
    async with answering(CHUNKED % status + begin, piece) as (url, sent):
        answer = await posted(url)
        while not sent:
            await asyncio.sleep(0.01)
    assert (answer.status, answer.headers["retry-after"], len(answer.headers)) == (status, "7", 2)
    assert len(answer.body) <= MAX_BODY
    # What was on its way when the connection was cut counts too.
    assert sent[0] < ENOUGH
