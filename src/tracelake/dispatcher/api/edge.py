"""The outermost layer of a surface: measures every request, bounds its time, hands the services in.

Plain ASGI around the application, so that requests which match no route are measured and bounded as well.
"""

from __future__ import annotations

import asyncio
import re
from time import perf_counter
from typing import Any

from litestar import Litestar
from litestar.types import HTTPScope, Message, Receive, Send
from prometheus_client import CollectorRegistry, Counter, Histogram

from tracelake.dispatcher.api.problems import problem, problem_answer
from tracelake.dispatcher.api.services import Services

_PARAMETER_TYPE = re.compile(r":[a-z]+}")
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class HttpMetrics:
    """Requests by route template, never by path: a path has as many values as there are tasks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "tracelake_http_requests",
            "Requests answered.",
            ["surface", "method", "route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tracelake_http_request_seconds",
            "Time from the first byte of a request to the end of its answer.",
            ["surface", "method", "route"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._children: dict[tuple[str, str, str, int], tuple[Counter, Histogram]] = {}

    def record(self, surface: str, method: str, route: str, status: int, seconds: float) -> None:
        key = (surface, method, route, status)
        children = self._children.get(key)
        if children is None:
            template = _PARAMETER_TYPE.sub("}", route)
            children = (
                self._requests.labels(surface, method, template, str(status)),
                self._seconds.labels(surface, method, template),
            )
            self._children[key] = children
        children[0].inc()
        children[1].observe(seconds)


class Surface:
    """One port's application."""

    def __init__(
        self, name: str, litestar: Litestar, services: Services, metrics: HttpMetrics, timeout: float
    ) -> None:
        self.litestar = litestar
        self.services = services
        self._name = name
        self._metrics = metrics
        self._timeout = timeout

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await self.litestar(scope, receive, send)

    async def _serve(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})["services"] = self.services
        try:
            async with asyncio.timeout(self._timeout):
                await self.litestar(scope, receive, watched)
        except TimeoutError:
            if status:
                raise
            late = problem(503, "Timeout", f"not answered within {self._timeout:g} seconds")
            await problem_answer(late)(scope, receive, watched)
        finally:
            method = scope["method"] if "path_template" in scope else "any"
            route = scope.get("path_template", "unmatched")
            self._metrics.record(self._name, method, route, status, perf_counter() - began)
