"""The Query Service process: wires slots, catalog, data, audit and one port together.

It answers as soon as its slots are there, whatever of the databases is: ``/readyz`` says what is missing, and what
comes later is found without a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import httpx
import msgspec
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from tracelake.domain.errors import Unavailable
from tracelake.query.audit import AuditLog
from tracelake.query.authentication import (
    JWKS_PATH,
    CatalogClock,
    TaskAuthenticator,
    UserAuthenticator,
    key_fetcher,
)
from tracelake.query.catalog import Catalog
from tracelake.query.engine.slots import Slots
from tracelake.query.export import collect_exports
from tracelake.query.export_folder import ExportFolder
from tracelake.query.metrics import QueryMetrics
from tracelake.query.open_relation import RelationOpener
from tracelake.query.routes import QUERY_ROUTES
from tracelake.query.run_query import QueryRunner
from tracelake.query.services import QueryApiRequest, QueryServices
from tracelake.query.settings import QueryLimits, QuerySettings
from tracelake.query.snapshot import HotDatabase
from tracelake.serving.edge import Surface
from tracelake.serving.http_metrics import HttpMetrics
from tracelake.serving.identity import Authenticator, Identity
from tracelake.serving.listener import Listener
from tracelake.serving.services import Check
from tracelake.serving.surface import build_surface, describe_routes
from tracelake.tokens.jwks_cache import JwksCache

TITLE = "Tracelake Query Service"
SPARE_SECONDS = 30.0
"""What a request may take besides its wait and its query: connecting, opening files, the audit, a slow reader."""
DRAIN_SECONDS = 2.5

log = structlog.get_logger(__name__)


class _DispatcherFile(msgspec.Struct, frozen=True):
    internal_url: str


async def run_query_service(
    settings: QuerySettings, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Serve until ``stop`` is set; running queries have a moment to end. ``on_ready`` is given the URL."""
    async with AsyncExitStack() as stack:
        port = Listener("query", settings.host, settings.port)
        stack.callback(port.close)
        surface, runner = await stack.enter_async_context(open_surface(settings))
        serving = asyncio.create_task(port.serve(surface))
        stopping = asyncio.create_task(stop.wait())
        await port.started()
        log.info("query service ready", url=port.url)
        on_ready(port.url)
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        log.info("query service stopping")
        stopping.cancel()
        port.stop()
        await asyncio.wait({serving}, timeout=DRAIN_SECONDS)
        runner.stop()
        await serving
    log.info("query service stopped")


@asynccontextmanager
async def open_surface(settings: QuerySettings) -> AsyncIterator[tuple[Surface, QueryRunner]]:
    """The port's application over its databases and slots, all of which are closed behind it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    async with AsyncExitStack() as stack:
        catalog = await Catalog.open(settings.catalog_dsn)
        stack.push_async_callback(catalog.close)
        audit = await AuditLog.open(settings.audit_dsn)
        stack.push_async_callback(audit.close)
        hot = HotDatabase(settings.reading_dsn)
        stack.push_async_callback(hot.close)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=5.0, trust_env=False))
        limits = settings.limits
        slots = await Slots.open(
            settings.slots, limits.of_slot(), queue=limits.queue, unconfined=limits.unconfined
        )
        stack.push_async_callback(slots.close)
        _say_what_confines(slots)
        metrics = QueryMetrics(registry)
        metrics.watch_slots(slots.count, lambda: slots.free)
        opener = RelationOpener(catalog, hot, settings.object_root)
        exports = ExportFolder(settings.exports, limits, earlier=settings.object_root / "exports")
        collecting = asyncio.create_task(collect_exports(exports))
        stack.push_async_callback(_end, collecting)
        runner = QueryRunner(slots, opener, audit, exports, settings.limits, metrics)
        clock = CatalogClock(catalog.now)
        keys = JwksCache(JWKS_PATH, key_fetcher(http, partial(find_dispatcher, settings)))
        authenticators: dict[Identity, Authenticator] = {
            Identity.TASK: TaskAuthenticator(
                keys, clock.now, issuer=settings.issuer, audience=settings.audience
            ),
            Identity.USER: UserAuthenticator(catalog.user),
        }
        services = QueryServices(
            registry=registry,
            checks=_checks(catalog, audit, hot if settings.reading_dsn else None, slots),
            now=clock.now,
            openapi=describe(),
            runner=runner,
        )
        yield (
            build_surface(
                "query",
                QUERY_ROUTES,
                authenticators,
                services,
                QueryApiRequest,
                HttpMetrics(registry),
                request_seconds(settings.limits),
            ),
            runner,
        )


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def describe() -> bytes:
    """The OpenAPI document without serving it."""
    return describe_routes(TITLE, QUERY_ROUTES, QueryApiRequest)


def request_seconds(limits: QueryLimits) -> float:
    return limits.wait_seconds + limits.seconds + SPARE_SECONDS


def find_dispatcher(settings: QuerySettings) -> str:
    """The Dispatcher's internal port: as given, or as its own file says now."""
    if settings.internal_url is not None:
        return settings.internal_url
    if settings.dispatcher_file is not None:
        with suppress(OSError, msgspec.DecodeError):
            content = settings.dispatcher_file.read_bytes()
            return msgspec.json.decode(content, type=_DispatcherFile).internal_url
    raise Unavailable("DispatcherUnknown", "no Dispatcher has said where it is")


def _checks(catalog: Catalog, audit: AuditLog, hot: HotDatabase | None, slots: Slots) -> Mapping[str, Check]:
    async def confined() -> str:
        return slots.confinement

    checks: dict[str, Check] = {"catalog": catalog.check, "audit": audit.check, "slots": confined}
    return checks if hot is None else {**checks, "data": hot.check}


def _say_what_confines(slots: Slots) -> None:
    say = log.info if slots.confined else log.warning
    say("slots ready", slots=slots.count, confinement=slots.confinement, confined=slots.confined)
