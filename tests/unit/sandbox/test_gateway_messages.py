"""What a gateway takes for a request: nothing that could mean two things."""

from __future__ import annotations

import h11
import pytest

from tracelake.domain.errors import BadRequest, MethodNotAllowed, NotFound
from tracelake.sandbox.gateway_connection import parse


def request(target: bytes, *headers: tuple[bytes, bytes], method: bytes = b"POST") -> h11.Request:
    return h11.Request(method=method, target=target, headers=[(b"host", b"gateway"), *headers])


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/task/../../internal/events",
        b"/v1/task/./events",
        b"/v1/task/%2e%2e/events",
        b"/v1/task/%2E%2E%2Finternal",
        b"/v1/task//events",
        b"//v1/task/events",
        b"/v1/task/events/",
        b"/v1/task/.hidden",
        b"/v1/task/a\\b",
        b"/v1/task/events;x=1",
        b"/v1/task/events#part",
        b"http://127.0.0.1:8601/v1/task/events",
        b"127.0.0.1:8601",
        b"*",
        b"/v1/task/events?x=^",
    ],
)
def test_a_path_that_is_not_plain_leads_nowhere(target: bytes) -> None:
    with pytest.raises(NotFound):
        parse(request(target), b"")


def test_a_plain_path_and_its_query_are_taken() -> None:
    parsed = parse(request(b"/v1/task/events?limit=5&name=a%20b"), b"{}")
    assert (parsed.method, parsed.path, parsed.query) == ("POST", "/v1/task/events", "limit=5&name=a%20b")
    assert parsed.body == b"{}"


@pytest.mark.parametrize("method", [b"PUT", b"DELETE", b"CONNECT", b"TRACE", b"OPTIONS", b"get"])
def test_only_get_and_post_pass(method: bytes) -> None:
    with pytest.raises(MethodNotAllowed):
        parse(request(b"/v1/task/events", method=method), b"")


def test_headers_of_the_connection_and_of_the_worker_are_not_heard() -> None:
    headers = parse(
        request(
            b"/v1/task/events",
            (b"X-Trace-Worker-Token", b"stolen"),
            (b"Authorization", b"Bearer stolen"),
            (b"Connection", b"keep-alive, X-Named"),
            (b"X-Named", b"1"),
            (b"Upgrade", b"h2c"),
            (b"X-Trace-Task-Capability", b"own"),
        ),
        b"",
    ).headers
    assert headers == {"host": "gateway", "x-trace-task-capability": "own"}


def test_a_token_said_twice_is_refused() -> None:
    twice = ((b"x-trace-task-capability", b"own"), (b"X-Trace-Task-Capability", b"other"))
    with pytest.raises(BadRequest):
        parse(request(b"/v1/task/events", *twice), b"")
