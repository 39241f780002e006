"""A try after which the receiver may have the message is never taken for one that it can't have."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

import pytest

from tests.support.delivery_scene import Received, Receiver, Reply, accept
from tracelake.delivery.addresses import Allowance, Blocked, ReceiverAddresses, ReceiverEndpoint, read_url
from tracelake.delivery.connect import NotSent
from tracelake.delivery.http_post import HttpPoster, ReceiverAnswer, TryUnanswered
from tracelake.delivery.targets import judge_answer

ALLOWED = Allowance.parse("hooks.example")
LOOPBACK = ["127.0.0.1"]


def opened(*resolved: list[str] | Exception) -> HttpPoster:
    """The host's addresses at one look after the other; the last stay."""
    answers = list(resolved)

    async def resolve(_host: str, _port: int) -> list[str]:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    # Plain text, so the system's authorities needn't be loaded.
    return HttpPoster(ReceiverAddresses(ALLOWED, resolve), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


def endpoint_of(receiver: Receiver) -> ReceiverEndpoint:
    return read_url(f"http://hooks.example:{receiver.port}/hook", ("http",), ALLOWED)[0]


async def fails_at_second(poster: HttpPoster, receiver: Receiver, *, keeps_listening: bool) -> Exception:
    """The receiver reads a second request on the kept connection and closes it without an answer."""

    def answer(received: Received) -> Reply | None:
        if len(receiver.received) == 1:
            return accept(received)
        if not keeps_listening and receiver._server is not None:
            receiver._server.close()
        return None

    receiver.answer = answer
    await receiver.open()
    endpoint = endpoint_of(receiver)
    try:
        assert (await poster.post(endpoint, "/hook", {}, b"{}", 10)).status == 200
        with pytest.raises((NotSent, Blocked, TryUnanswered)) as caught:
            await poster.post(endpoint, "/hook", {}, b"{}", 10)
    finally:
        poster.close()
        await receiver.close()
    assert len(receiver.received) >= 2
    return caught.value


@pytest.mark.parametrize(
    ("resolved", "keeps_listening", "words"),
    [
        ([LOOPBACK], False, "can't connect"),
        ([LOOPBACK], True, "before it answered"),
        ([LOOPBACK, OSError("no such name")], True, "no such name"),
        ([LOOPBACK, []], True, "no address"),
    ],
)
async def test_a_request_that_was_written_is_in_doubt_whatever_keeps_it_from_going_again(
    resolved: Iterable[list[str] | Exception], keeps_listening: bool, words: str
) -> None:
    failed = await fails_at_second(opened(*resolved), Receiver(), keeps_listening=keeps_listening)
    assert isinstance(failed, TryUnanswered)
    assert words in str(failed)


async def test_a_request_that_was_not_written_is_not_in_doubt() -> None:
    receiver = Receiver()
    await receiver.open()
    endpoint = endpoint_of(receiver)
    await receiver.close()
    with pytest.raises(NotSent):
        await opened(LOOPBACK).post(endpoint, "/hook", {}, b"{}", 10)


@pytest.mark.parametrize(
    ("status", "in_doubt"),
    [
        *((each, True) for each in (302, 303, 408, 500, 501, 502, 503, 504, 520, 599)),
        *((each, False) for each in (301, 307, 308, 400, 401, 404, 410, 429)),
    ],
)
def test_an_answer_that_may_follow_the_work_leaves_it_in_doubt(status: int, in_doubt: bool) -> None:
    assert judge_answer(ReceiverAnswer(status, {}, b"")).in_doubt is in_doubt
