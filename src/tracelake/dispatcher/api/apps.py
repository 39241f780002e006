"""The two applications: the internal port for workers and tasks, the user port for people.

A port has no route for anything that it doesn't serve: ``/internal/*`` and ``/v1/task/*`` are unknown paths to the
user port, whatever the method and the credential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from tracelake.dispatcher.api.authenticators import (
    TaskAuthenticator,
    UserAuthenticator,
    WorkerAuthenticator,
)
from tracelake.dispatcher.api.buffers import BUFFER_ROUTES, BUFFER_VIEWS
from tracelake.dispatcher.api.dags import DAG_ROUTES, DAG_VERSION_VIEWS, JOB_ROUTES
from tracelake.dispatcher.api.datasets import COVERAGE_VIEWS, DATASET_VIEWS, EXPLAIN_VIEWS
from tracelake.dispatcher.api.deliveries import DELIVERY_ROUTES, DELIVERY_VIEWS
from tracelake.dispatcher.api.functions import BUNDLE_ROUTES, INVOKER_ROUTES
from tracelake.dispatcher.api.pressure import PRESSURE_VIEWS
from tracelake.dispatcher.api.query_proxy import QUERY_ROUTES, QueryService
from tracelake.dispatcher.api.request import ApiRequest, DispatcherServices
from tracelake.dispatcher.api.sources import BODY_ROUTES, SCHEDULER_ROUTES, SOURCE_VIEWS
from tracelake.dispatcher.api.tasks import TASK_ROUTES, TASK_VIEWS, WORKER_ROUTES
from tracelake.dispatcher.dispatch import Dispatch
from tracelake.queue.base import Queue
from tracelake.serving.database_clock import DatabaseClock
from tracelake.serving.endpoint import Route
from tracelake.serving.identity import Authenticator, Identity
from tracelake.serving.openapi import document
from tracelake.serving.request import Check
from tracelake.serving.surface import HEALTH_ROUTES, USER_HEALTH_ROUTES, HttpMetrics, Surface
from tracelake.store.db import Database, DeployLock, database_now
from tracelake.tokens.jose import PublicKeys
from tracelake.tokens.opaque_tokens import WorkerTokens

REQUEST_SECONDS = 30.0
INTERNAL_ROUTES = (
    *WORKER_ROUTES,
    *INVOKER_ROUTES,
    *SCHEDULER_ROUTES,
    *BODY_ROUTES,
    *TASK_ROUTES,
    *BUFFER_ROUTES,
    *DELIVERY_ROUTES,
    *HEALTH_ROUTES,
)
USER_ROUTES = (
    *DAG_ROUTES,
    *DAG_VERSION_VIEWS,
    *BUNDLE_ROUTES,
    *TASK_VIEWS,
    *DATASET_VIEWS,
    *COVERAGE_VIEWS,
    *BUFFER_VIEWS,
    *DELIVERY_VIEWS,
    *EXPLAIN_VIEWS,
    *JOB_ROUTES,
    *PRESSURE_VIEWS,
    *SOURCE_VIEWS,
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
    """``/readyz`` runs ``checks`` besides that of the state database."""
    ctx = dispatch.ctx
    now = _clock(ctx.db).now
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
    """``token_ttl`` limits how long a revoked token still works; queries are passed on to ``query``, and ``queue``
    is asked for its depths."""
    authenticators: dict[Identity, Authenticator] = {
        Identity.USER: UserAuthenticator(dispatch.ctx.db, ttl=token_ttl)
    }
    return _surface("user", USER_ROUTES, authenticators, dispatch, metrics, checks, timeout, query, queue)


def describe(name: str, routes: Sequence[Route]) -> bytes:
    """The OpenAPI document of a port that isn't served, for tests and the reference pages."""
    return document(_title(name), routes)


def _surface(
    name: str,
    routes: Sequence[Route],
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
        now=_clock(dispatch.ctx.db).now,
        openapi=describe(name, routes),
    )
    return Surface(name, routes, authenticators, services, ApiRequest, metrics, timeout)


def _title(name: str) -> str:
    return f"Tracelake Dispatcher, {name} port"


def _clock(db: Database) -> DatabaseClock:
    return DatabaseClock(lambda: db.run(database_now, lock=DeployLock.NONE))


def _state_check(db: Database) -> Check:
    async def check() -> None:
        await db.run(database_now, lock=DeployLock.NONE)

    return check
