"""The two applications: the internal port for workers and tasks, the user port for people.

What isn't served on a port has no route there: ``/internal/*`` and ``/v1/task/*`` are unknown paths to the
user port, whatever the method and the credential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from litestar.handlers import HTTPRouteHandler

from tracelake.dispatcher.api.authenticators import TaskAuthenticator, UserAuthenticator, WorkerAuthenticator
from tracelake.dispatcher.api.buffer_routes import BUFFER_ROUTES
from tracelake.dispatcher.api.buffer_views import BUFFER_VIEWS
from tracelake.dispatcher.api.bundle_routes import BUNDLE_ROUTES, INVOKER_ROUTES
from tracelake.dispatcher.api.coverage_views import COVERAGE_VIEWS
from tracelake.dispatcher.api.dag_routes import DAG_ROUTES
from tracelake.dispatcher.api.dag_version_views import DAG_VERSION_VIEWS
from tracelake.dispatcher.api.dataset_views import DATASET_VIEWS
from tracelake.dispatcher.api.dispatch import Dispatch
from tracelake.dispatcher.api.explain_views import EXPLAIN_VIEWS
from tracelake.dispatcher.api.job_routes import JOB_ROUTES
from tracelake.dispatcher.api.query_proxy import QUERY_ROUTES
from tracelake.dispatcher.api.query_service import QueryService
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.dispatcher.api.services import DispatcherServices
from tracelake.dispatcher.api.state_clock import StateClock
from tracelake.dispatcher.api.task_routes import TASK_ROUTES
from tracelake.dispatcher.api.task_views import TASK_VIEWS
from tracelake.dispatcher.api.worker_routes import WORKER_ROUTES
from tracelake.queue.base import Queue
from tracelake.serving.edge import Surface
from tracelake.serving.health_routes import HEALTH_ROUTES, USER_HEALTH_ROUTES
from tracelake.serving.http_metrics import HttpMetrics
from tracelake.serving.identity import Authenticator, Identity
from tracelake.serving.services import Check
from tracelake.serving.surface import build_surface, describe_routes
from tracelake.store import clock
from tracelake.store.db import Database, DeployLock
from tracelake.tokens.jwks import PublicKeys
from tracelake.tokens.worker_tokens import WorkerTokens

REQUEST_SECONDS = 30.0
INTERNAL_ROUTES = (*WORKER_ROUTES, *INVOKER_ROUTES, *TASK_ROUTES, *BUFFER_ROUTES, *HEALTH_ROUTES)
USER_ROUTES = (
    *DAG_ROUTES,
    *DAG_VERSION_VIEWS,
    *BUNDLE_ROUTES,
    *TASK_VIEWS,
    *DATASET_VIEWS,
    *COVERAGE_VIEWS,
    *BUFFER_VIEWS,
    *EXPLAIN_VIEWS,
    *JOB_ROUTES,
    *QUERY_ROUTES,
    *USER_HEALTH_ROUTES,
)


def internal_app(
    dispatch: Dispatch,
    *,
    worker_tokens: WorkerTokens,
    public_keys: Callable[[datetime], PublicKeys],
    metrics: HttpMetrics,
    checks: Mapping[str, Check] | None = None,
    timeout: float = REQUEST_SECONDS,
) -> Surface:
    """``checks`` are what ``/readyz`` looks at besides the state database."""
    ctx = dispatch.ctx
    now = StateClock(ctx.db).now
    authenticators: dict[Identity, Authenticator] = {
        Identity.WORKER: WorkerAuthenticator(worker_tokens),
        Identity.TASK: TaskAuthenticator(public_keys, now, issuer=ctx.issuer, audience=ctx.audience),
    }
    return _surface("internal", INTERNAL_ROUTES, authenticators, dispatch, metrics, checks, timeout)


def user_app(
    dispatch: Dispatch,
    *,
    metrics: HttpMetrics,
    checks: Mapping[str, Check] | None = None,
    timeout: float = REQUEST_SECONDS,
    token_ttl: float = 3.0,
    query: QueryService | None = None,
    queue: Queue | None = None,
) -> Surface:
    """``token_ttl`` bounds how long a revoked token still works; ``query`` is what queries are passed on to, and
    ``queue`` what is asked how full it is."""
    authenticators: dict[Identity, Authenticator] = {
        Identity.USER: UserAuthenticator(dispatch.ctx.db, ttl=token_ttl)
    }
    return _surface("user", USER_ROUTES, authenticators, dispatch, metrics, checks, timeout, query, queue)


def describe(name: str, routes: Sequence[HTTPRouteHandler]) -> bytes:
    """The OpenAPI document of a port without serving it: what clients and tests are made from."""
    return describe_routes(_title(name), routes, ApiRequest)


def _surface(
    name: str,
    routes: Sequence[HTTPRouteHandler],
    authenticators: Mapping[Identity, Authenticator],
    dispatch: Dispatch,
    metrics: HttpMetrics,
    checks: Mapping[str, Check] | None,
    timeout: float,
    query: QueryService | None = None,
    queue: Queue | None = None,
) -> Surface:
    services = DispatcherServices(
        dispatch=dispatch,
        query=query or QueryService(None),
        queue=queue,
        registry=metrics.registry,
        checks={"state": _state_check(dispatch.ctx.db), **(checks or {})},
        now=StateClock(dispatch.ctx.db).now,
        openapi=describe(name, routes),
    )
    return build_surface(name, routes, authenticators, services, ApiRequest, metrics, timeout)


def _title(name: str) -> str:
    return f"Tracelake Dispatcher, {name} port"


def _state_check(db: Database) -> Check:
    async def check() -> None:
        await db.run(clock.now, lock=DeployLock.NONE)

    return check
