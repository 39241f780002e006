"""The gateway passes on what a task may ask for, word by word anew, and nothing else gets through."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import h11
import httpx
import pytest

from tracelake.contracts.buffers import MAX_BATCH_BYTES
from tracelake.domain.errors import Forbidden
from tracelake.sandbox import sandbox
from tracelake.sandbox.gateway import Gateway, GatewayLimits
from tracelake.sandbox.layout import SandboxSpec, python_runtime
from tracelake.sandbox.sandbox import Sandbox
from tracelake.serving.small_http import ServedRequest, ServedResponse

pytestmark = pytest.mark.xdist_group("sandbox")


@dataclass
class Upstream:
    """Keeps what it was told, byte by byte, and answers in kind."""

    url: str = ""
    heard: list[bytes] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                said += piece
                connection.receive_data(piece)
                while (event := connection.next_event()) is not h11.NEED_DATA:
                    if isinstance(event, h11.EndOfMessage):
                        self.heard.append(said)
                        said = b""
                        body = b'{"answered": true}'
                        writer.write(
                            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nSet-Cookie: a=b\r\n"
                            b"X-Trace-Row-Count: 1\r\nX-Trace-Truncated: false\r\n"
                            b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
                        )
                        await writer.drain()
                        writer.close()
                        return


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    heard = Upstream()
    server = await asyncio.start_server(heard.answer, "127.0.0.1", 0)
    heard.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield heard
    server.close()
    await server.wait_closed()


class Runtime:
    """Echoes, or waits for ever and says whether it was given up."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    async def __call__(self, request: ServedRequest) -> ServedResponse:
        if request.path.endswith("/next"):
            self.asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        return ServedResponse(202, {"x-path": request.path}, request.body)


def refuse_others(request: ServedRequest) -> None:
    if request.headers.get("x-trace-task-capability") == "another":
        raise Forbidden("NotYourTask", "this token is another task's")


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
async def gateway(upstream: Upstream, runtime: Runtime, tmp_path: Path) -> AsyncIterator[Path]:
    limits = GatewayLimits(connections=4, body_bytes=100_000, total_bytes=150_000, head_bytes=4096)
    served = Gateway(dispatcher_url=upstream.url, runtime=runtime, admit=refuse_others, limits=limits)
    path = tmp_path / "gateway.sock"
    await served.listen(path)
    yield path
    await served.close()


@pytest.fixture
async def client(gateway: Path) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=str(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as inside:
        yield inside


async def raw(gateway: Path, said: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(gateway)
    writer.write(said)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_a_task_request_is_passed_on_with_its_token_alone(
    client: httpx.AsyncClient, upstream: Upstream
) -> None:
    headers = {
        "X-Trace-Task-Capability": "own",
        "X-Trace-Worker-Token": "stolen",
        "Authorization": "Bearer stolen",
        "Cookie": "a=b",
        "X-Forwarded-For": "10.0.0.1",
        "Content-Type": "application/json",
    }
    answer = await client.post("/v1/task/events?x=1", headers=headers, content=b'{"a": 1}')
    assert (answer.status_code, answer.json()) == (200, {"answered": True})
    assert "set-cookie" not in answer.headers
    (heard,) = upstream.heard
    head, _, body = heard.lower().partition(b"\r\n\r\n")
    assert head.startswith(b"post /v1/task/events?x=1 http/1.1\r\n")
    names = {line.split(b":")[0] for line in head.split(b"\r\n")[1:]}
    assert b"x-trace-task-capability: own" in head
    assert not names & {b"x-trace-worker-token", b"authorization", b"cookie", b"x-forwarded-for"}
    assert body == b'{"a": 1}'


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/internal/task-claim",
        "/internal/events",
        "/v1/dags",
        "/v1/query",
        "/v1/task",
        "/v1/taskx/events",
        "/v1/task/query",
        "/metrics",
        "/2018-06-01/other",
    ],
)
async def test_anything_else_is_not_there(client: httpx.AsyncClient, upstream: Upstream, path: str) -> None:
    assert (await client.post(path)).status_code == 404
    assert upstream.heard == []


@pytest.mark.parametrize(
    "line",
    [
        b"POST /v1/task/../../internal/events HTTP/1.1",
        b"POST /v1/task/%2e%2e/%2e%2e/internal/events HTTP/1.1",
        b"POST http://127.0.0.1/internal/events HTTP/1.1",
        b"CONNECT 127.0.0.1:8601 HTTP/1.1",
        b"POST /v1/task/events\t/internal HTTP/1.1",
        b"POST /v1/task/events HTTP/2.0",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_a_request_line_with_a_trick_is_refused(gateway: Path, upstream: Upstream, line: bytes) -> None:
    answer = await raw(gateway, line + b"\r\nHost: gateway\r\nContent-Length: 0\r\n\r\n")
    assert answer.split()[1] in (b"400", b"404", b"405")
    assert upstream.heard == []


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 4\r\nContent-Length: 40\r\n",
        b"Content-Length: 4, 40\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X: a\r\n\tb\x00\r\n",
        b"X-Trace-Task-Capability: a\r\nX-Trace-Task-Capability: b\r\nContent-Length: 0\r\n",
    ],
)
async def test_headers_that_smuggle_are_refused(gateway: Path, upstream: Upstream, headers: bytes) -> None:
    answer = await raw(
        gateway,
        b"POST /v1/task/events HTTP/1.1\r\nHost: g\r\n"
        + headers
        + b"\r\n0\r\n\r\nGET /internal HTTP/1.1\r\n\r\n",
    )
    assert answer.split()[1] in (b"400", b"501")
    assert upstream.heard == []


async def test_what_follows_a_request_is_a_request_of_its_own(gateway: Path, upstream: Upstream) -> None:
    answer = await raw(
        gateway,
        b"POST /v1/task/events HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\n\r\nPOST /internal/events HTTP/1.1\r\nHost: g\r\nContent-Length: 0\r\n\r\n",
    )
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"404"]
    (heard,) = upstream.heard
    assert b"transfer-encoding" not in heard.lower()
    assert heard.endswith(b"\r\n\r\n{}")


async def test_large_heads_and_bodies_are_refused_before_they_are_kept(
    client: httpx.AsyncClient, gateway: Path, upstream: Upstream
) -> None:
    assert (await client.post("/v1/task/events", content=b"x" * 100_001)).status_code == 413
    assert (await client.post("/v1/task/events", content=b"x" * 100_000)).status_code == 200
    answer = await raw(gateway, b"GET /v1/task/" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n")
    assert answer.split()[1] in (b"400", b"431")
    assert len(upstream.heard) == 1


async def test_another_tasks_token_is_refused_by_the_worker(
    client: httpx.AsyncClient, upstream: Upstream
) -> None:
    answer = await client.post("/v1/task/complete", headers={"X-Trace-Task-Capability": "another"})
    assert (answer.status_code, answer.json()["reason"]) == (403, "NotYourTask")
    assert upstream.heard == []


async def test_a_service_that_is_down_is_told_as_such(tmp_path: Path, runtime: Runtime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    served = Gateway(dispatcher_url=url, runtime=runtime)
    await served.listen(tmp_path / "g.sock")
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "g.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as inside:
        answer = await inside.post("/v1/task/events")
    await served.close()
    assert (answer.status_code, answer.json()["reason"]) == (503, "UpstreamUnavailable")


async def test_queries_go_to_the_query_service(tmp_path: Path, upstream: Upstream, runtime: Runtime) -> None:
    served = Gateway(dispatcher_url="http://127.0.0.1:1", query_url=upstream.url, runtime=runtime)
    await served.listen(tmp_path / "g.sock")
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "g.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as inside:
        answer = await inside.post("/v1/task/query", content=b"{}")
    await served.close()
    assert answer.status_code == 200
    assert (answer.headers["x-trace-row-count"], answer.headers["x-trace-truncated"]) == ("1", "false")
    assert upstream.heard[0].startswith(b"POST /v1/task/query ")


async def test_without_a_query_service_a_function_hears_what_is_missing(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/task/query", content=b"{}")
    assert (answer.status_code, answer.json()["reason"]) == (404, "NotServed")


async def test_the_largest_publish_passes(tmp_path: Path, upstream: Upstream, runtime: Runtime) -> None:
    served = Gateway(dispatcher_url=upstream.url, runtime=runtime)
    await served.listen(tmp_path / "gateway.sock")
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "gateway.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as inside:
        largest = b"x" * (MAX_BATCH_BYTES + 1024)
        assert (await inside.post("/v1/task/buffer-publish", content=largest)).status_code == 200
        assert (await inside.post("/v1/task/buffer-publish", content=largest * 2)).status_code == 413
    await served.close()
    assert [len(said) > MAX_BATCH_BYTES for said in upstream.heard] == [True]


async def test_the_runtime_api_is_the_workers_own(client: httpx.AsyncClient, upstream: Upstream) -> None:
    answer = await client.post("/2018-06-01/runtime/invocation/1/response", content=b"value")
    assert (answer.status_code, answer.content) == (202, b"value")
    assert answer.headers["x-path"] == "/2018-06-01/runtime/invocation/1/response"
    assert upstream.heard == []


async def test_a_runtime_that_hangs_up_is_noticed(gateway: Path, runtime: Runtime) -> None:
    _, writer = await asyncio.open_unix_connection(gateway)
    writer.write(b"GET /2018-06-01/runtime/invocation/next HTTP/1.1\r\nHost: g\r\n\r\n")
    async with asyncio.timeout(30):
        await runtime.asked.wait()
        writer.close()
        await runtime.given_up.wait()


async def test_connections_are_limited(gateway: Path) -> None:
    held = [await asyncio.open_unix_connection(gateway) for _ in range(4)]
    for _, writer in held:
        writer.write(b"GET /nothing HTTP/1.1\r\nHost: g\r\n\r\n")
    for reader, _ in held:
        assert await reader.readuntil(b"\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        assert await raw(gateway, b"GET /nothing HTTP/1.1\r\nHost: g\r\n\r\n") == b""
    for _, writer in held:
        writer.close()


PROGRAM = """
import http.client, json, socket, urllib.request

class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("/run/tracelake/gateway.sock")

def ask(connection, path):
    connection.request("POST", path, b"{}", {"X-Trace-Task-Capability": "own"})
    answer = connection.getresponse()
    answer.read()
    return answer.status

paths = ["/v1/task/events", "/2018-06-01/runtime/init/error", "/internal/events"]
told = {"unix": [ask(Unix("gateway"), path) for path in paths]}
told["tcp"] = [ask(http.client.HTTPConnection("127.0.0.1", 9001), path) for path in paths]
print(json.dumps(told))
"""


async def test_a_sandbox_speaks_to_its_gateway_by_both_sockets(
    gateway: Path, upstream: Upstream, runtime: Runtime, tmp_path: Path
) -> None:
    assert sandbox.find_program() is not None, "scripts/install-system-packages installs bubblewrap"
    code = tmp_path / "code"
    code.mkdir()
    code.chmod(0o755)
    python = python_runtime()
    box = await Sandbox.open()
    read, write = os.pipe()
    started = await box.start(
        SandboxSpec(
            argv=[python.executable, "-I", "-S", "-c", PROGRAM],
            env=python.env,
            code=code,
            runtime=python.binds,
            sockets={"/run/tracelake/gateway.sock": gateway},
            listen=[9001],
            stdout=write,
            stderr=write,
        )
    )
    os.close(write)
    inner = Gateway(dispatcher_url=upstream.url, runtime=runtime)
    await inner.listen(started.listeners[0])
    with open(read) as pipe:
        said = await asyncio.to_thread(pipe.read)
    await started.wait()
    await inner.close()
    await box.close()
    assert json.loads(said) == {"unix": [200, 202, 404], "tcp": [200, 202, 404]}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", 9001)


async def test_a_gateway_that_is_given_up_while_it_begins_to_listen_leaves_nothing_open() -> None:
    async def runtime(request: ServedRequest) -> ServedResponse:
        raise AssertionError(request.path)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        gateway = Gateway(dispatcher_url="http://127.0.0.1:1", runtime=runtime)
        listening = asyncio.ensure_future(gateway.listen(listener))
        await asyncio.sleep(0)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        await gateway.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
