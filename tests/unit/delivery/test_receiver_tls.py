"""TLS to receivers is verified by their name: no other name, no unknown authority, no expired certificate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from tests.support.certificates import Authority
from tests.support.delivery_scene import Receiver
from tests.support.mail_server import MailServerOfTest
from tracelake.delivery.addresses import Allowance, ReceiverAddresses, read_url
from tracelake.delivery.connect import NotSent
from tracelake.delivery.http_post import HttpPoster
from tracelake.delivery.smtp import Mailer, MailServer

HOST = "hooks.example"
ALLOWED = Allowance.parse(HOST)
MAIL = b"Subject: x\r\n\r\nx\r\n"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def _loopback(_host: str, _port: int) -> list[str]:
    return ["127.0.0.1"]


def addresses() -> ReceiverAddresses:
    return ReceiverAddresses(ALLOWED, _loopback)


@asynccontextmanager
async def posting(authority: Authority) -> AsyncIterator[HttpPoster]:
    poster = HttpPoster(addresses(), authority.trusted())
    try:
        yield poster
    finally:
        poster.close()


async def post(poster: HttpPoster, receiver: Receiver) -> int:
    endpoint, path = read_url(f"https://{HOST}:{receiver.port}/hook", ("https",), ALLOWED)
    return (await poster.post(endpoint, path, {}, b"{}", 30)).status


async def test_a_receiver_with_a_certificate_for_its_name_is_posted_to(authority: Authority) -> None:
    receiver = Receiver()
    await receiver.open(authority.serving(HOST))
    async with posting(authority) as poster:
        assert await post(poster, receiver) == 200
        assert await post(poster, receiver) == 200
    await receiver.close()
    assert receiver.received[0].headers["host"] == f"{HOST}:{receiver.port}"


@pytest.mark.parametrize(
    ("name", "days", "own"),
    [
        ("other.example", 1, True),
        ("sub.hooks.example", 1, True),
        # The address that it was reached at isn't what it was asked for.
        ("127.0.0.1", 1, True),
        (HOST, -1, True),
        (HOST, 1, False),
    ],
    ids=["another name", "a name below", "its address", "expired", "unknown authority"],
)
@pytest.mark.parametrize("kind", ["https", "smtps", "starttls"])
async def test_any_other_certificate_ends_the_try_before_a_byte_is_sent(
    authority: Authority, name: str, days: int, own: bool, kind: str
) -> None:
    signing = authority if own else Authority()
    tls = signing.serving(name, until=timedelta(days=days))
    if kind == "https":
        receiver = Receiver()
        await receiver.open(tls)
        async with posting(authority) as poster:
            with pytest.raises(NotSent, match="CERTIFICATE_VERIFY_FAILED"):
                await post(poster, receiver)
        await receiver.close()
        assert receiver.received == []
        return
    async with MailServerOfTest(tls, implicit=kind == "smtps") as server:
        scheme = "smtps" if kind == "smtps" else "smtp"
        target = MailServer.parse(f"{scheme}://user:secret@{HOST}:{server.port}", ALLOWED)
        with pytest.raises(NotSent, match="CERTIFICATE_VERIFY_FAILED"):
            await Mailer(addresses(), authority.trusted()).send(
                target, "a@b.example", ["c@d.example"], MAIL, 30
            )
    assert not any(each.startswith(("AUTH", "MAIL")) for each in server.commands)


async def test_by_default_the_systems_authorities_are_asked(authority: Authority) -> None:
    receiver = Receiver()
    await receiver.open(authority.serving(HOST))
    poster = HttpPoster(addresses())
    with pytest.raises(NotSent, match="CERTIFICATE_VERIFY_FAILED"):
        await post(poster, receiver)
    poster.close()
    await receiver.close()


async def test_a_host_that_is_allowed_and_answers_https_in_plain_text_gets_nothing(
    authority: Authority,
) -> None:
    async with MailServerOfTest() as server, posting(authority) as poster:
        endpoint, path = read_url(f"https://{HOST}:{server.port}/", ("https",), ALLOWED)
        with pytest.raises(NotSent, match="TLS failed"):
            await poster.post(endpoint, path, {}, b"{}", 30)
    assert server.commands == []
