"""The invoke endpoint over HTTP: who may call, what it takes, and what it says to everything else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.functions import TestInvoker, invocation, open_test_invoker, python_bundle, sha256_of
from tracelake.contracts.bundles import Invocation, function_of
from tracelake.settings import Secret
from tracelake.worker.lambda_.invoke_server import InvokeEndpoint, InvokeServer

TOKEN = "tlw_" + "t" * 40
SLEEPS = python_bundle("import time\ndef handler(event, context):\n    time.sleep(600)\n")


class Caller:
    def __init__(self, invoker: TestInvoker, port: int) -> None:
        self.invoker = invoker
        self.port = port
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)

    async def invoke(
        self, task: Invocation | dict[str, Any], function: str | None = None, **headers: str
    ) -> httpx.Response:
        name = function or (function_of(task) if isinstance(task, Invocation) else "noop")
        return await self._http.post(
            f"/2015-03-31/functions/{name}/invocations",
            content=msgspec.json.encode(task),
            headers={"X-Trace-Worker-Token": TOKEN, "X-Amz-Invocation-Type": "Event", **headers},
        )

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path, headers={"X-Trace-Worker-Token": TOKEN})

    async def close(self) -> None:
        await self._http.aclose()


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncIterator[Caller]:
    async with open_test_invoker(tmp_path, concurrency=1) as invoker:
        listener = socket.create_server(("127.0.0.1", 0))
        server = InvokeServer(InvokeEndpoint(invoker.invoker, Secret(TOKEN)).handle, max_body=100_000)
        await server.start(listener)
        opened = Caller(invoker, listener.getsockname()[1])
        try:
            yield opened
        finally:
            await opened.close()
            await server.close()


async def test_an_attempt_is_taken_once_and_answered_the_same_again(caller: Caller) -> None:
    task = invocation(None)
    assert [(await caller.invoke(task)).status_code for _ in range(3)] == [202, 202, 202]
    assert (await caller.invoker.dispatcher.end_of(task.task_id)).status == "Completed"
    assert (await caller.invoke(task)).status_code == 202
    assert len(caller.invoker.dispatcher.completions[task.task_id]) == 1


async def test_a_full_invoker_says_so_and_takes_nothing(caller: Caller) -> None:
    caller.invoker.bundles[sha256_of(SLEEPS)] = SLEEPS
    assert (await caller.invoke(invocation(SLEEPS))).status_code == 202
    late = invocation(None)
    assert (await caller.invoke(late)).status_code == 429
    assert late.task_id not in caller.invoker.dispatcher.completions


async def test_a_stopping_invoker_takes_nothing(caller: Caller) -> None:
    await caller.invoker.invoker.stop(0)
    assert (await caller.invoke(invocation(None))).status_code == 503


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x"])
async def test_nobody_without_the_worker_token_gets_in(caller: Caller, token: str) -> None:
    answer = await caller.invoke(invocation(None), **{"X-Trace-Worker-Token": token})
    assert (answer.status_code, answer.json()["reason"]) == (401, "WorkerTokenInvalid")
    assert caller.invoker.invoker.running == 0


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"udf": {"bundle": "md5:1", "entrypoint": "a.b"}}, 422),
        ({"udf": {"bundle": "sha256:" + "0" * 64}}, 422),
        ({"udf": {"bundle": "sha256:" + "0" * 64, "entrypoint": "a\nb"}}, 422),
        ({"udf": "x"}, 422),
        ({"operator": "sql_transform"}, 422),
        ({"attempt": 0}, 422),
        ({"timeout_seconds": 0}, 422),
        ({"lease_token": "no"}, 400),
        ({"task_id": None}, 400),
        ({"udf": {"bundle": "sha256:" + "0" * 64, "entrypoint": "a.b"}}, 422),
    ],
)
async def test_what_can_not_be_run_is_refused_and_named(
    caller: Caller, change: dict[str, Any], status: int
) -> None:
    answer = await caller.invoke({**msgspec.to_builtins(invocation(None)), **change})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert caller.invoker.invoker.running == 0


async def test_only_events_are_taken(caller: Caller) -> None:
    answer = await caller.invoke(invocation(None), **{"X-Amz-Invocation-Type": "RequestResponse"})
    assert answer.status_code == 400


async def test_other_paths_and_methods_are_not_found(caller: Caller) -> None:
    assert (await caller.get("/2015-03-31/functions/noop/invocations")).status_code == 404
    assert (await caller.get("/")).status_code == 404


async def test_a_body_that_is_too_large_is_refused(caller: Caller) -> None:
    answer = await caller.invoke(invocation(None, config={"x": "y" * 200_000}))
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"\x00\x01\x02\r\n\r\n", id="bytes"),
        pytest.param(b"GET\r\n\r\n", id="half a line"),
        pytest.param(b"A" * 100_000, id="an endless line"),
    ],
)
async def test_what_is_no_http_ends_the_connection_and_nothing_else(caller: Caller, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", caller.port)
    writer.write(said)
    async with asyncio.timeout(30):
        assert (await reader.read()).startswith(b"HTTP/1.1 4")
    writer.close()
    assert (await caller.invoke(invocation(None))).status_code == 202
