"""The ASGI application of one port: finds the route, checks the credential, bounds the time, measures, answers.

An exception of a route becomes the problem that its caller gets (``contracts.problem``); an unexpected one is
logged in full. Every request takes this one way; a port has no route for anything that it doesn't serve. Each port
also has routes about itself: alive, ready, metrics, OpenAPI. They need no credential, except for the metrics of a
user port: their labels name datasets and operators. Internal ports are reached only by the platform and its
monitoring.

HTTP metrics are plain numbers that become metric families when they are scraped. The client library's histogram
takes locks and walks its buckets on every observation; here an observation is a binary search and a few additions,
all on the event loop's thread, which hot requests can afford.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil
from time import perf_counter

import structlog
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tracelake.contracts.problem import PROBLEM_JSON, Problem, encode_problem, problem, problem_of
from tracelake.domain.errors import (
    MethodNotAllowed,
    RateLimited,
    TracelakeError,
    Unauthenticated,
    Unavailable,
)
from tracelake.serving.endpoint import Operation, Route, Router, endpoint
from tracelake.serving.identity import CHALLENGES, Authentication, Authenticator, Identity
from tracelake.serving.request import Check, Services, SurfaceRequest
from tracelake.serving.response import AsgiMessage, AsgiReceive, AsgiScope, AsgiSend, Response, json_response

CHECK_SECONDS = 3.0
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PROBLEM = PROBLEM_JSON.encode()

_log = structlog.get_logger(__name__)


class Surface:
    def __init__(
        self,
        name: str,
        routes: Sequence[Route],
        authenticators: Mapping[Identity, Authenticator],
        services: Services,
        request_class: type[SurfaceRequest],
        metrics: HttpMetrics,
        timeout: float,
    ) -> None:
        """Raises ``ValueError`` for a route whose credential this port can't check."""
        for route in routes:
            identity = route.operation.identity
            if identity is not Identity.NONE and identity not in authenticators:
                raise ValueError(f"{route.path}: the {name} port can't authenticate a {identity}")
        self.services = services
        self._name = name
        self._router = Router(routes)
        self._request_class = request_class
        self._authentication = Authentication(authenticators)
        self._metrics = metrics
        self._timeout = timeout

    @property
    def routes(self) -> tuple[Route, ...]:
        return self._router.routes

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        began = perf_counter()
        status = 0

        async def watched(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        method, path = scope["method"], scope["path"]
        scope.setdefault("state", {})["services"] = self.services
        try:
            route, parameters = self._router.find(method, path)
        except Exception as error:
            await _refusal(error, Identity.NONE, method, path)(scope, receive, watched)
            # One name for all of them: methods and paths are the
            # client's choice, and would be labels without end.
            self._metrics.record(self._name, "any", "unmatched", status, perf_counter() - began)
            return
        seconds = route.operation.seconds or self._timeout
        try:
            # Around the sending too, so that a caller who doesn't read can't hold the request.
            async with asyncio.timeout(seconds):
                answer = await self._answer(route, parameters, scope, receive)
                await answer(scope, receive, watched)
        except TimeoutError:
            # An answer that has begun can't become another one: the listener cuts the connection.
            if status:
                raise
            late = problem(Unavailable.status, "Timeout", f"not answered within {seconds:g} seconds")
            await _problem_answer(late)(scope, receive, watched)
        finally:
            self._metrics.record(self._name, method, route.path, status, perf_counter() - began)

    async def _answer(
        self, route: Route, parameters: Mapping[str, str], scope: AsgiScope, receive: AsgiReceive
    ) -> Response:
        identity = route.operation.identity
        try:
            await self._authentication.check(scope, identity)
            return await route.handler(self._request_class(scope, receive, parameters))
        except Exception as error:
            return _refusal(error, identity, scope["method"], scope["path"])


def _refusal(error: Exception, identity: Identity, method: str, path: str) -> Response:
    """The answer to a request whose route raised ``error``; ``identity`` is the credential that the route asks
    for."""
    found = problem_of(error)
    if found.status == TracelakeError.status:
        _log.error("request_failed", method=method, path=path, exc_info=error)
    if isinstance(error, Unauthenticated):
        # A webhook's caller proves itself by a signature, for which there is no challenge.
        challenge = CHALLENGES.get(identity)
        return _problem_answer(found, ((b"www-authenticate", challenge.encode()),) if challenge else ())
    if isinstance(error, RateLimited):
        seconds = str(max(1, ceil(error.retry_after)))
        return _problem_answer(found, ((b"retry-after", seconds.encode()),))
    if isinstance(error, MethodNotAllowed):
        return _problem_answer(found, ((b"allow", error.allowed.encode()),))
    return _problem_answer(found)


def _problem_answer(found: Problem, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Response:
    return Response(encode_problem(found), status=found.status, media_type=_PROBLEM, headers=headers)


class Health(Struct, frozen=True):
    status: str


class Readiness(Struct, frozen=True):
    status: str
    checks: dict[str, str]


@endpoint("GET", "/healthz", Operation(identity=Identity.NONE, answers={200: Health}))
async def healthz(request: SurfaceRequest) -> Response:
    """The process answers. Checks nothing else, so that an outage of the database restarts no process."""
    return json_response(Health("ok"))


@endpoint("GET", "/readyz", Operation(identity=Identity.NONE, answers={200: Readiness}))
async def readyz(request: SurfaceRequest) -> Response:
    """The service's dependencies can be used: its databases, its queue."""
    checks = request.services.checks
    found = await asyncio.gather(*(_look(name, check) for name, check in checks.items()))
    states = dict(zip(checks, found, strict=True))
    failing = [name for name, state in states.items() if state is None]
    if failing:
        raise Unavailable("NotReady", f"not usable: {', '.join(failing)}")
    return json_response(Readiness("ready", {name: state or "ok" for name, state in states.items()}))


async def _look(name: str, check: Check) -> str | None:
    """The state of a dependency; None when it can't be used."""
    try:
        # A check that hangs must not make the probe hang, which would look like a dead process.
        async with asyncio.timeout(CHECK_SECONDS):
            return await check() or "ok"
    except Exception as error:
        _log.warning("not_ready", check=name, error=f"{type(error).__name__}: {error}")
        return None


async def metrics(request: SurfaceRequest) -> Response:
    """Prometheus metrics in the text format."""
    return Response(generate_latest(request.services.registry), media_type=CONTENT_TYPE_LATEST.encode())


@endpoint("GET", "/openapi.json", Operation(identity=Identity.NONE, answers={200: dict}))
async def openapi(request: SurfaceRequest) -> Response:
    """This port's API as an OpenAPI document."""
    return Response(request.services.openapi)


def health_routes(may_see_metrics: Identity) -> tuple[Route, ...]:
    operation = Operation(identity=may_see_metrics, answers={200: "text/plain"})
    return (healthz, readyz, endpoint("GET", "/metrics", operation)(metrics), openapi)


HEALTH_ROUTES = health_routes(Identity.NONE)
"""For internal ports."""
USER_HEALTH_ROUTES = health_routes(Identity.USER)


class _Route:
    """One route's requests with one status."""

    __slots__ = ("buckets", "count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)


class HttpMetrics(Collector):
    """Requests by route template, never by path: a path has as many values as there are tasks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._routes: dict[tuple[str, str, str, int], _Route] = {}
        registry.register(self)

    def record(self, surface: str, method: str, route: str, status: int, seconds: float) -> None:
        key = (surface, method, route, status)
        seen = self._routes.get(key)
        if seen is None:
            seen = self._routes[key] = _Route()
        seen.count += 1
        seen.seconds += seconds
        seen.buckets[bisect_left(BUCKETS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        labels = ["surface", "method", "route", "status"]
        requests = CounterMetricFamily("tracelake_http_requests", "Requests answered.", labels=labels)
        seconds = HistogramMetricFamily(
            "tracelake_http_request_seconds",
            "Time from the head of a request to the end of its answer.",
            labels=labels,
        )
        for (surface, method, route, status), seen in list(self._routes.items()):
            values = [surface, method, route, str(status)]
            requests.add_metric(values, seen.count)
            bounds = [*(str(bound) for bound in BUCKETS), "+Inf"]
            totals = [(bound, float(n)) for bound, n in zip(bounds, accumulate(seen.buckets), strict=True)]
            seconds.add_metric(values, buckets=totals, sum_value=seen.seconds)
        yield requests
        yield seconds
