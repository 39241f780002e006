"""Whatever a function sends to its gateway: its own attempt's calls pass, nothing else does, the gateway lives."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import h11
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracelake.sandbox import gateway_connection
from tracelake.sandbox.gateway import Gateway, GatewayLimits
from tracelake.worker.lambda_.runtime_api import AttemptToken, RuntimeApi, RuntimeCall
from tracelake.worker.lambda_.start_environment import admission

TASK, OTHER = UUID(int=1), UUID(int=2)


def token(task: UUID = TASK, attempt: object = 1, more: str = "") -> str:
    claims = json.dumps({"task_id": str(task), "attempt": attempt, "jti": more}).encode()
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (b"{}", claims, b"sig"))


OWN = token()
GOOD = (
    b"POST /v1/task/events HTTP/1.1\r\nHost: g\r\nX-Trace-Task-Capability: %b\r\nContent-Length: 2\r\n\r\n{}"
)


@dataclass
class Upstream:
    """Keeps what it was asked."""

    heard: list[tuple[h11.Request, bytes]] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, head, body = h11.Connection(h11.SERVER), None, b""
        with contextlib.suppress(ConnectionError):
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(65536))
                elif isinstance(event, h11.Request):
                    head = event
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    break
            if head is not None:
                self.heard.append((head, body))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()


class Scene:
    """A gateway before a function that has an event, as the invoker makes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.upstream = Upstream()
        self.api = RuntimeApi()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Scene]:
        server = await asyncio.start_server(self.upstream.answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        served = Gateway(
            dispatcher_url=url,
            query_url=url,
            runtime=self.api.handle,
            admit=admission(self.api, set()),
            limits=GatewayLimits(body_bytes=10_000, total_bytes=20_000),
        )
        call = RuntimeCall(b"{}", deadline_ms=1, arn="a", trace_id="t", token=AttemptToken(OWN, TASK, 1))
        running = asyncio.create_task(self.api.invoke(call))
        await served.listen(self.path)
        await self.ask(b"GET /2018-06-01/runtime/invocation/next HTTP/1.1\r\nHost: g\r\n\r\n", end=False)
        assert self.api.busy
        try:
            yield self
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await served.close()
            server.close()
            await server.wait_closed()

    async def ask(self, said: bytes, *, end: bool = True) -> bytes:
        """All that is answered; without ``end``, the first answer's head."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            async with asyncio.timeout(60):
                with contextlib.suppress(ConnectionError):
                    writer.write(said)
                    await writer.drain()
                    if end:
                        writer.write_eof()
                        return await reader.read()
                return await reader.readuntil(b"\r\n\r\n")
        finally:
            writer.close()

    async def status(self, said: bytes) -> int:
        return int((await self.ask(said)).split()[1])


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with Scene(tmp_path / "g.sock").open() as made:
        yield made


@pytest.mark.parametrize("own", [OWN, token(more="renewed by a heartbeat")], ids=["invoked with", "renewed"])
async def test_the_attempts_own_token_passes(scene: Scene, own: str) -> None:
    assert await scene.status(GOOD % own.encode()) == 200
    ((head, body),) = scene.upstream.heard
    assert dict(head.headers)[b"x-trace-task-capability"] == own.encode()
    assert body == b"{}"


@pytest.mark.parametrize(
    "presented",
    [
        token(OTHER),
        token(attempt=2),
        token(attempt="1"),
        token(attempt=True),
        token(attempt=1.5),
        OWN + "x.y",
        OWN.upper(),
        OWN[:-4],
        f"{OWN} {token(OTHER)}",
        f"{OWN},{token(OTHER)}",
        token(OTHER) + "\r\n " + OWN,
        "a.b.c",
        "..",
        "x",
        "x" * 10_000,
        "é",
    ],
    ids=range(16),
)
async def test_any_other_token_is_refused_here(scene: Scene, presented: str) -> None:
    for path in (b"/v1/task/events", b"/v1/task/complete", b"/v1/task/query", b"/v1/task/credentials"):
        said = (GOOD % presented.encode("latin-1")).replace(b"/v1/task/events", path)
        # A signature that was cut off is for the Dispatcher to refuse: it names this attempt.
        if presented == OWN[:-4]:
            continue
        assert await scene.status(said) == 403
    assert scene.upstream.heard == [] or presented == OWN[:-4]


async def test_no_token_is_refused_here(scene: Scene) -> None:
    assert await scene.status(GOOD % b"") == 401
    assert await scene.status(b"POST /v1/task/events HTTP/1.1\r\nHost: g\r\nContent-Length: 0\r\n\r\n") == 401
    assert scene.upstream.heard == []


async def test_a_token_that_is_given_twice_is_refused(scene: Scene) -> None:
    for second in (OWN, token(OTHER)):
        for name in (b"x-trace-task-capability", b"X-TRACE-TASK-CAPABILITY"):
            more = b"\r\n" + name + b": " + second.encode() + b"\r\nContent-Length"
            said = (GOOD % OWN.encode()).replace(b"\r\nContent-Length", more)
            assert await scene.status(said) == 400
    assert scene.upstream.heard == []


METHODS = ("HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "CONNECT", "PRI", "GARBAGE", "x-y", "GET1")


async def test_every_method_gets_an_answer_and_the_log_stays_quiet(scene: Scene) -> None:
    with structlog.testing.capture_logs() as lines:
        for method in METHODS:
            for path in ("/v1/task/events", "/2018-06-01/runtime/invocation/next", "/", "*"):
                head = f"{method} {path} HTTP/1.1\r\nHost: g\r\nX-Trace-Task-Capability: {OWN}\r\n\r\n"
                answer = await scene.ask(head.encode() * 2)
                assert set(re.findall(rb"HTTP/1.1 (\d+)", answer)) <= {b"400", b"405"}
                assert answer.startswith(b"HTTP/1.1 4")
                if method == "HEAD":
                    assert re.fullmatch(rb"(HTTP/1\.1 405 (?:[^\n]+\n)+\r\n){2}", answer)
    assert lines == []
    assert scene.upstream.heard == []
    assert await scene.status(GOOD % OWN.encode()) == 200


@pytest.mark.parametrize(
    "target",
    [
        "/v1/task/../internal/events",
        "/v1/task/..",
        "/v1/task/./events",
        "/v1/task/%2e%2e/internal",
        "/v1/task/%2E./internal",
        "/v1/task//events",
        "//v1/task/events",
        "/v1/task/events%00",
        "/v1/task/events%2f..%2f..",
        "/v1/task\\events",
        "http://127.0.0.1:1/v1/task/events",
        "http://g/internal/task-claim",
        "/V1/task/events",
        "/v1/task/events#x",
        "/internal/task-claim?/v1/task/",
        "/v1/task/;/../internal",
    ],
)
async def test_a_target_with_a_trick_is_nowhere(scene: Scene, target: str) -> None:
    assert await scene.status((GOOD % OWN.encode()).replace(b"/v1/task/events", target.encode())) in (
        400,
        404,
    )
    assert scene.upstream.heard == []


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 2\r\nContent-Length: 3",
        b"Content-Length: 2, 3",
        b"Content-Length: +2",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Content-Length : 2",
        b" Content-Length: 2",
        b"Content-Length: 2\x00",
    ],
)
async def test_a_length_that_means_two_things_is_refused(scene: Scene, headers: bytes) -> None:
    said = (GOOD % OWN.encode()).replace(b"Content-Length: 2", headers)
    assert await scene.status(said + GOOD % OWN.encode()) in (400, 403, 501)
    assert scene.upstream.heard == []


async def test_an_upgrade_is_not_passed_on(scene: Scene) -> None:
    asked = b"Content-Length: 2\r\nConnection: upgrade, x-trace-worker-token\r\nUpgrade: websocket\r\nTE: trailers"
    assert await scene.status((GOOD % OWN.encode()).replace(b"Content-Length: 2", asked)) == 200
    ((head, _),) = scene.upstream.heard
    assert not {name for name, _ in head.headers} & {b"upgrade", b"te", b"trailer", b"x-trace-worker-token"}


async def test_a_head_that_is_too_large_and_one_that_never_ends_are_answered(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = (GOOD % OWN.encode()).replace(b"Host: g", b"Host: g\r\nX: " + b"x" * 40_000)
    assert await scene.status(large) == 431
    assert await scene.status(b"GET /" + b"x" * 100_000) == 431
    monkeypatch.setattr(gateway_connection, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(gateway_connection, "BODY_SECONDS", 0.05)
    for half in ((GOOD % OWN.encode())[:30], (GOOD % OWN.encode())[:-1]):
        assert (await scene.ask(half, end=False)).startswith(b"HTTP/1.1 408")
    assert await scene.status(GOOD % OWN.encode()) == 200


async def test_what_breaks_inside_is_one_answer_and_few_lines(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(request: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(scene.api, "handle", broken)
    served = Gateway(dispatcher_url="http://127.0.0.1:1", runtime=scene.api.handle)
    path = scene.path.with_name("broken.sock")
    await served.listen(path)
    inner = Scene(path)
    try:
        with structlog.testing.capture_logs() as lines:
            for _ in range(20):
                assert await inner.status(b"GET /2018-06-01/runtime/x HTTP/1.1\r\nHost: g\r\n\r\n") == 500
                assert await inner.status(GOOD % b"x") == 503
    finally:
        await served.close()
    assert len(lines) == 1


_PARTS = st.sampled_from(
    [
        *(f"{method} ".encode() for method in (*METHODS, "GET", "POST")),
        b"/v1/task/events", b"/v1/task/query", b"/internal/task-claim", b"/../", b"%2e", b"?a=b", b" ", b"\t",
        b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/9.9\r\n", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\x00", b"\xff",
        b"Host: g\r\n", b"X-Trace-Task-Capability: " + OWN.encode() + b"\r\n",
        b"X-Trace-Task-Capability: " + token(OTHER).encode() + b"\r\n", b"X-Trace-Worker-Token: w\r\n",
        b"Content-Length: 2\r\n", b"Content-Length: 0\r\n", b"Content-Length: -1\r\n", b"Connection: close\r\n",
        b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n", b": x\r\n", b" x\r\n",
        b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", GOOD % OWN.encode(),
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(said=st.lists(st.one_of(_PARTS, st.binary(max_size=20)), max_size=12).map(b"".join))
def test_whatever_is_said_only_own_calls_pass_and_the_gateway_lives(said: bytes) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder, structlog.testing.capture_logs() as lines:
            async with Scene(Path(folder) / "g.sock").open() as scene:
                with contextlib.suppress(IndexError):
                    await scene.ask(said)
                assert await scene.status(GOOD % OWN.encode()) == 200
                for head, _ in scene.upstream.heard:
                    names = [name for name, _ in head.headers]
                    assert re.match(rb"/v1/task/[a-z]+(\?|$)", head.target)
                    assert names.count(b"x-trace-task-capability") == 1
                    assert dict(head.headers)[b"x-trace-task-capability"] == OWN.encode()
                    assert b"x-trace-worker-token" not in names
            assert lines == []

    asyncio.run(run())
