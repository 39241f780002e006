"""A port of a process for its monitoring: ``/metrics`` for Prometheus, ``/healthz``, and nothing else.

Workers, invokers, sinks and every other process without an API for people serve it; the Dispatcher has the same
paths on its ports. It takes no credential and knows none: a page is made from the process's registry alone, whose
metrics hold numbers and names of things, never a secret. Names of DAGs, jobs and datasets aren't public
either, so it listens on loopback unless a setting says otherwise.

Nobody can keep the process from its work by it. Requests have no body; connections are few, and the oldest makes
room for the next one; a page that was made a moment ago is sent again, however often it is asked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from prometheus_client.process_collector import ProcessCollector

from tracelake import __version__
from tracelake.domain.errors import MethodNotAllowed, NotFound, TooLarge
from tracelake.serving.http_limits import NO_ROOM, ConnectionLimiter, HttpLimits, peer_of
from tracelake.serving.local_sockets import LOOPBACK, bound, inherited, stop_listening
from tracelake.serving.small_http import ServedConnection, ServedResponse, SmallHttpServer, connection_limits

METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"
METRICS = "metrics"
"""The port's name: in errors, and among those that a supervisor holds."""
LIMITS = HttpLimits(
    head_bytes=8 * 1024,
    head_seconds=5.0,
    body_seconds=10.0,
    connections=64,
    peer_connections=32,
)
PAGE_SECONDS = 0.5
"""A page this old is made anew."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where a process serves its metrics; port 0 picks a free one."""

    host: str = LOOPBACK
    port: int = 0


def process_registry(part: str) -> CollectorRegistry:
    """The registry of a process, with the metrics that every one has. ``part`` says what it is: ``worker``,
    ``sink``."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    info = Gauge(
        "tracelake_process_info", "1, with the part and the version.", ["part", "version"], registry=registry
    )
    info.labels(part, __version__).set(1)
    return registry


@asynccontextmanager
async def serve_metrics(address: MetricsAddress, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve the registry until the context ends; gives the port's URL. Raises ``Conflict`` for a taken port."""
    at = METRICS, address.host, address.port
    listening = inherited(*at, os.environ) or bound(*at)
    # The duplicate stays valid when the server has closed its own, and can then end the listening.
    held = listening.dup()
    server = _MetricsServer(_Page(registry))
    try:
        await server.listen(listening)
        host, port = listening.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _log.info("metrics_served", url=url + METRICS_PATH)
        yield url
    finally:
        await server.close()
        listening.close()
        # A supervisor that holds the port has the same socket, which would go on accepting.
        stop_listening(held)
        held.close()


class _Page:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made = -PAGE_SECONDS
        self._body = b""

    def text(self) -> bytes:
        now = time.monotonic()
        if now - self._made >= PAGE_SECONDS:
            self._body, self._made = generate_latest(self._registry), now
        return self._body


def _metrics(page: _Page) -> ServedResponse:
    return ServedResponse(200, {"content-type": CONTENT_TYPE_LATEST}, page.text())


def _health(page: _Page) -> ServedResponse:
    return ServedResponse(200, {"content-type": "application/json"}, b'{"status":"ok"}')


_PAGES = {METRICS_PATH.encode(): _metrics, HEALTH_PATH.encode(): _health}


class _MetricsServer(SmallHttpServer):
    def __init__(self, page: _Page) -> None:
        super().__init__(self._enter, lambda: _log.exception("metrics_request_failed"))
        self.page = page
        self.limiter = ConnectionLimiter(LIMITS)

    def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _MetricsConnection | None:
        connection = _MetricsConnection(reader, writer, self)
        if not self.limiter.enter(connection):
            writer.write(NO_ROOM)
            writer.close()
            return None
        return connection


class _MetricsConnection(ServedConnection):
    """One caller's connection, as ``ConnectionLimiter`` counts it: there is no credential to be known by."""

    known = False

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: _MetricsServer
    ) -> None:
        super().__init__(reader, writer, connection_limits(LIMITS))
        self._server = server
        self.peer = peer_of(writer.get_extra_info("peername"), writer.get_extra_info("sockname"))

    def evict(self) -> None:
        self.writer.transport.abort()

    async def serve(self) -> None:
        try:
            await super().serve()
        finally:
            self._server.limiter.leave(self)

    def check_head(self, head: h11.Request) -> None:
        """One that announces a body is refused, and its connection ends: nobody looks for where the body does."""
        for name, value in head.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
                raise TooLarge("TooLarge", "a request here has no body")

    def take_piece(self, already: int, more: int) -> None:
        raise TooLarge("TooLarge", "a request here has no body")

    def over(self) -> None:
        pass

    async def answer(self, head: h11.Request, body: bytes) -> None:
        page = _PAGES.get(head.target.partition(b"?")[0])
        if page is None:
            raise NotFound("NotFound", f"this port has {METRICS_PATH} and {HEALTH_PATH}")
        if head.method not in (b"GET", b"HEAD"):
            raise MethodNotAllowed("MethodNotAllowed", "metrics are read by GET", ("GET", "HEAD"))
        await self.send(page(self._server.page))
