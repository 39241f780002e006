"""What every port says about itself: alive, ready, metrics, the API's description.

To anybody, but for the metrics: their labels name datasets and operators, so on a port that people come to,
they need a credential. On internal ports, which are for the platform and whoever watches it, they need none.
"""

from __future__ import annotations

import asyncio

import structlog
from litestar.handlers import HTTPRouteHandler
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tracelake.domain.errors import Unavailable
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.request import ApiRequest
from tracelake.serving.services import Check

CHECK_SECONDS = 3.0

log = structlog.get_logger(__name__)


class Health(Struct, frozen=True):
    status: str


class Readiness(Struct, frozen=True):
    status: str
    checks: dict[str, str]


@endpoint("GET", "/healthz", Operation(identity=Identity.NOBODY, answers={200: Health}))
async def healthz(request: ApiRequest) -> Answer:
    """The process answers. Touches nothing else, so that an outage of the database restarts nobody."""
    return json_answer(Health("ok"))


@endpoint("GET", "/readyz", Operation(identity=Identity.NOBODY, answers={200: Readiness}))
async def readyz(request: ApiRequest) -> Answer:
    """What the service stands on can be used: its databases, its queue."""
    checks = request.services.checks
    found = await asyncio.gather(*(_look(name, check) for name, check in checks.items()))
    states = dict(zip(checks, found, strict=True))
    failing = [name for name, state in states.items() if state is None]
    if failing:
        raise Unavailable("NotReady", f"not usable: {', '.join(failing)}")
    return json_answer(Readiness("ready", {name: state or "ok" for name, state in states.items()}))


async def _look(name: str, check: Check) -> str | None:
    """How it stands; None when it can't be used."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return await check() or "ok"
    except Exception as error:
        log.warning("not_ready", check=name, error=f"{type(error).__name__}: {error}")
        return None


async def metrics(request: ApiRequest) -> Answer:
    """Prometheus metrics in the text format."""
    return Answer(generate_latest(request.services.registry), media_type=CONTENT_TYPE_LATEST.encode())


@endpoint("GET", "/openapi.json", Operation(identity=Identity.NOBODY, answers={200: dict}))
async def openapi(request: ApiRequest) -> Answer:
    """This port's API as an OpenAPI document."""
    return Answer(request.services.openapi)


def health_routes(may_see_metrics: Identity) -> tuple[HTTPRouteHandler, ...]:
    operation = Operation(identity=may_see_metrics, answers={200: "text/plain"})
    return (healthz, readyz, endpoint("GET", "/metrics", operation)(metrics), openapi)


HEALTH_ROUTES = health_routes(Identity.NOBODY)
"""Of internal ports."""
USER_HEALTH_ROUTES = health_routes(Identity.USER)
