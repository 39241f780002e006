"""The port for monitoring answers metrics and health, to whoever asks, however they ask, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from tracelake.domain.errors import Conflict
from tracelake.serving.local_sockets import LOOPBACK, HeldPort, handed_down
from tracelake.serving.metrics_port import LIMITS, MetricsAddress, process_registry, serve_metrics

WAIT = 10.0


@pytest.fixture
def registry() -> CollectorRegistry:
    return process_registry("test")


@pytest.fixture
async def client(registry: CollectorRegistry) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_metrics(MetricsAddress(), registry) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=WAIT) as client,
    ):
        yield client


async def test_metrics_are_those_of_the_registry(
    client: httpx.AsyncClient, registry: CollectorRegistry
) -> None:
    gauge = Gauge("tracelake_hostile", "A name that was chosen badly.", ["job"], registry=registry)
    gauge.labels('a"} 1\nb{').set(7)
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["tracelake_hostile"].labels == {"job": 'a"} 1\nb{'}
    assert samples["tracelake_process_info"].labels["part"] == "test"
    assert samples["process_cpu_seconds_total"].value > 0


async def test_it_is_loopback_unless_told_otherwise(client: httpx.AsyncClient) -> None:
    assert client.base_url.host == LOOPBACK
    assert (await client.get("/healthz")).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/readyz", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/tasks", 404),
        ("POST", "/internal/task-claim", 404),
        ("GET", "/healthz/metrics", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
    ],
)
async def test_there_is_nothing_else(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers.get("allow") == ("GET, HEAD" if status == 405 else None)


async def test_a_head_has_no_body_and_a_query_is_ignored(client: httpx.AsyncClient) -> None:
    answer = await client.head("/metrics?collect[]=x")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 0


async def test_a_body_is_not_read(client: httpx.AsyncClient) -> None:
    answer = await client.request("GET", "/metrics", content=b"x" * 100)
    assert answer.status_code == 413


async def test_connections_that_say_nothing_make_room(client: httpx.AsyncClient) -> None:
    assert client.base_url.port is not None
    silent = [
        await asyncio.open_connection(LOOPBACK, client.base_url.port)
        for _ in range(2 * LIMITS.peer_connections)
    ]
    try:
        assert (await client.get("/healthz")).status_code == 200
        async with asyncio.timeout(WAIT):
            # The first one was thrown out: it ends without a byte, or by a reset.
            with contextlib.suppress(ConnectionResetError):
                assert not await silent[0][0].read()
    finally:
        for _, writer in silent:
            writer.transport.abort()


async def test_a_taken_port_is_refused(registry: CollectorRegistry) -> None:
    with socket.create_server((LOOPBACK, 0)) as other, pytest.raises(Conflict, match="the metrics port"):
        async with serve_metrics(MetricsAddress(port=other.getsockname()[1]), registry):
            pass


async def test_a_port_that_a_supervisor_holds_refuses_connections_afterwards(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = HeldPort(0)
    try:
        assert port.socket is not None
        environment, _ = handed_down({"metrics": port})
        # The child gets a duplicate of its own when it is started.
        name, _, descriptor = environment["TRACELAKE_LISTEN_FDS"].partition("=")
        monkeypatch.setenv("TRACELAKE_LISTEN_FDS", f"{name}={os.dup(int(descriptor))}")
        async with serve_metrics(MetricsAddress(port=port.number), registry) as url:
            assert url.endswith(f":{port.number}")
            with socket.create_connection((LOOPBACK, port.number)):
                pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, port.number))
    finally:
        port.close()
