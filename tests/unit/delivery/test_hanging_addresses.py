"""A receiver whose first address answers nothing is reached at the next one."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tracelake.delivery.addresses import Allowance, Blocked, ReceiverAddresses, read_url
from tracelake.delivery.connect import NotSent
from tracelake.delivery.http_post import HttpPoster
from tracelake.delivery.smtp import Mailer, MailRefused, MailServer

HANGS, ANSWERS = "127.0.0.1", "127.0.0.2"
ALLOWED = Allowance.parse("two.example")
SECONDS = 4.0


@pytest.fixture
def port() -> Iterator[int]:
    """A port that takes no more connections at one address, and is free at the other."""
    hanging = socket.socket()
    hanging.bind((HANGS, 0))
    hanging.listen(0)
    waiting = [socket.socket() for _ in range(6)]
    for each in waiting:
        each.setblocking(False)
        with suppress(BlockingIOError):
            each.connect(hanging.getsockname())
    yield hanging.getsockname()[1]
    for each in (hanging, *waiting):
        each.close()


class Resolved(ReceiverAddresses):
    def __init__(self, *found: str, allowance: Allowance = ALLOWED) -> None:
        async def resolve(_host: str, _port: int) -> list[str]:
            return list(found)

        super().__init__(allowance, resolve)


def tls() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def test_a_webhook_is_posted_to_the_next_address(port: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, ANSWERS, port)
    addresses = Resolved(HANGS, ANSWERS)
    poster = HttpPoster(addresses, tls())
    endpoint, path = read_url(f"http://two.example:{port}/x", ("http",), ALLOWED)
    try:
        assert (await poster.post(endpoint, path, {}, b"{}", SECONDS)).status == 200
        # The one that was reached is the first one now.
        assert await addresses.of(endpoint) == [ANSWERS, HANGS]
    finally:
        poster.close()
        server.close()


async def test_a_mail_server_is_reached_at_the_next_address(port: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 here\r\n")
        await reader.readuntil(b"\r\n")
        writer.write(b"550 not for you\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, ANSWERS, port)
    mailer = Mailer(Resolved(HANGS, ANSWERS), tls())
    try:
        with pytest.raises(MailRefused, match="550"):
            await mailer.send(
                MailServer.parse(f"smtp://two.example:{port}", ALLOWED),
                "a@b.example",
                ["c@d.example"],
                b"x",
                SECONDS,
            )
    finally:
        server.close()


async def test_all_addresses_are_judged_before_one_is_tried(port: int) -> None:
    poster = HttpPoster(Resolved("1.1.1.1", ANSWERS, allowance=Allowance()), tls())
    endpoint, path = read_url(f"https://two.example:{port}/x", ("https",), Allowance())
    with pytest.raises(Blocked):
        await poster.post(endpoint, path, {}, b"{}", SECONDS)


async def test_where_no_address_answers_nothing_was_sent(port: int) -> None:
    poster = HttpPoster(Resolved(HANGS, HANGS), tls())
    endpoint, path = read_url(f"http://two.example:{port}/x", ("http",), ALLOWED)
    with pytest.raises(NotSent, match="no connection within 1 s"):
        await poster.post(endpoint, path, {}, b"{}", 1)
