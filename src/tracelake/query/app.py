"""The Query Service process: wires slots, catalog, data, audit and one port together.

It answers as soon as its slots are ready, whether the databases are or not: ``/readyz`` says what is missing, and
the service finds it later without a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import httpx
import msgspec
import structlog

from tracelake import objects
from tracelake.contracts.token_claims import JWKS_PATH
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.query.api import QUERY_ROUTES, QueryApiRequest, QueryServices, describe
from tracelake.query.audit import AuditLog, QueryMetrics
from tracelake.query.caller import (
    QueryTaskAuthenticator,
    QueryUserAuthenticator,
    key_fetcher,
)
from tracelake.query.catalog import Catalog
from tracelake.query.engine.slots import Slots
from tracelake.query.export import ExportFolder, collect_exports
from tracelake.query.hot_rows import HotDatabase
from tracelake.query.open_relation import RelationOpener
from tracelake.query.run_query import QueryRunner
from tracelake.query.settings import QueryLimits, QuerySettings
from tracelake.serving.database_clock import DatabaseClock
from tracelake.serving.identity import Authenticator, Identity
from tracelake.serving.listener import Listener
from tracelake.serving.metrics_port import process_registry, serve_metrics
from tracelake.serving.request import Check
from tracelake.serving.surface import HttpMetrics, Surface
from tracelake.stack_connection import read_handle
from tracelake.tokens.capability import JwksCache

#: Time for a request besides its wait and its query: connecting, opening files, the audit, a slow reader.
SPARE_SECONDS = 30.0
DRAIN_SECONDS = 2.5

log = structlog.get_logger(__name__)


class _DispatcherFile(msgspec.Struct, frozen=True):
    internal_url: str


async def run_query_service(
    settings: QuerySettings, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Serve until ``stop`` is set; running queries have ``DRAIN_SECONDS`` to end. ``on_ready`` receives the URL."""
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
        # Queries that are still running would otherwise delay the end by their own time limits.
        runner.stop()
        await serving
    log.info("query service stopped")


@asynccontextmanager
async def open_surface(settings: QuerySettings) -> AsyncIterator[tuple[Surface, QueryRunner]]:
    """The port's application with its databases and slots, which are closed with the context."""
    registry = process_registry("query")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serve_metrics(settings.metrics, registry))
        catalog = await Catalog.open(settings.catalog_dsn)
        stack.push_async_callback(catalog.close)
        audit = await AuditLog.open(settings.audit_dsn)
        stack.push_async_callback(audit.close)
        hot = HotDatabase(settings.data_read_dsn)
        stack.push_async_callback(hot.close)
        # A proxy from the environment must not see calls between our own services.
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=5.0, trust_env=False))
        limits = settings.limits
        slots = await Slots.open(
            settings.slots, limits.of_slot(), queue=limits.queue, unconfined=limits.unconfined
        )
        # Closed in reverse order: queries end while the databases
        # that they read and are audited in are still open.
        stack.push_async_callback(slots.close)
        _log_confinement(slots)
        metrics = QueryMetrics(registry)
        metrics.watch_slots(slots.count, lambda: slots.free)
        store = objects.open(settings.objects)
        opener = RelationOpener(catalog, hot, store)
        # Exports lay in the object store once: old ones are still removed there.
        earlier = store.local.folder / "exports" if store.local is not None else None
        exports = ExportFolder(settings.export_root, limits, earlier=earlier)
        collecting = asyncio.create_task(collect_exports(exports))
        stack.push_async_callback(_end, collecting)
        runner = QueryRunner(slots, opener, audit, exports, settings.limits, metrics)
        clock = DatabaseClock(catalog.now)
        keys = JwksCache(JWKS_PATH, key_fetcher(http, partial(find_dispatcher, settings)))
        authenticators: dict[Identity, Authenticator] = {
            Identity.TASK: QueryTaskAuthenticator(
                keys, clock.now, issuer=settings.issuer, audience=settings.audience
            ),
            Identity.USER: QueryUserAuthenticator(catalog.user),
        }
        services = QueryServices(
            registry=registry,
            checks=_checks(catalog, audit, hot if settings.data_read_dsn else None, slots),
            now=clock.now,
            openapi=describe(),
            runner=runner,
        )
        yield (
            Surface(
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


def request_seconds(limits: QueryLimits) -> float:
    return limits.wait_seconds + limits.seconds + SPARE_SECONDS


def find_dispatcher(settings: QuerySettings) -> str:
    """The address of the Dispatcher's internal port, from the settings or from the Dispatcher's file."""
    if settings.internal_url is not None:
        return settings.internal_url
    if settings.dispatcher_file is not None:
        # An unreadable or damaged file counts as none: the Dispatcher may be replacing it.
        with suppress(Unavailable, Invalid):
            if handle := read_handle(settings.dispatcher_file, _DispatcherFile):
                return handle.internal_url
    raise Unavailable("DispatcherUnknown", "the Dispatcher's address isn't known yet")


def _checks(catalog: Catalog, audit: AuditLog, hot: HotDatabase | None, slots: Slots) -> Mapping[str, Check]:
    async def confined() -> str:
        return slots.confinement

    checks: dict[str, Check] = {"catalog": catalog.check, "audit": audit.check, "slots": confined}
    return checks if hot is None else {**checks, "data": hot.check}


def _log_confinement(slots: Slots) -> None:
    write = log.info if slots.confined else log.warning
    write("slots ready", slots=slots.count, confinement=slots.confinement, confined=slots.confined)
