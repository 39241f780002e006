"""``tracelake query-service``: SQL over datasets, for people and for tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.home_stack import stack_on
from tracelake.cli.stack import DEFAULT_HOME
from tracelake.secret import Secret

if TYPE_CHECKING:
    from tracelake.query.settings import QuerySettings

HELP = """Run the Query Service: one SELECT at a time over datasets, and nothing else can be reached by it.

It listens where tasks reach it (`/v1/task/query`) and the Dispatcher's user port, which passes `/v1/query` on to it
(`tracelake dispatcher --query-url`). Each query runs in a process of its own, without network and files, within
limits; one over its time is killed. Without bubblewrap and without Landlock (Linux 5.13) it refuses to start;
`TRACELAKE_QUERY_UNCONFINED=1` runs queries nevertheless.

How to reach the stack is read from the home of one that runs on this machine, or from the environment:
`TRACELAKE_CATALOG_DSN` and `TRACELAKE_AUDIT_DSN` (both come before the home), and `TRACELAKE_READING_DSN` for hot
tables, `TRACELAKE_OBJECT_ROOT`, and `TRACELAKE_INTERNAL_URL` (without it, the Dispatcher's own file in the home
says where it is). It starts before any of them is there; `/readyz` says what is missing.

Limits of one query come from the environment: `TRACELAKE_QUERY_SECONDS` (30), `TRACELAKE_QUERY_MEMORY_BYTES`,
`TRACELAKE_QUERY_SPILL_BYTES`, `TRACELAKE_QUERY_THREADS`, `TRACELAKE_QUERY_DEFAULT_ROWS` (10000),
`TRACELAKE_QUERY_MAX_ROWS` (1000000), `TRACELAKE_QUERY_RESULT_BYTES`, `TRACELAKE_QUERY_EXPORT_BYTES`; and how long
one waits for a slot, and how many may: `TRACELAKE_QUERY_WAIT_SECONDS` (10), `TRACELAKE_QUERY_QUEUE` (64).

Exported files lie in `exports` of the home (`TRACELAKE_EXPORT_ROOT`), which is the service's own, and are removed
after `TRACELAKE_QUERY_EXPORT_HOURS` (24). One user or task has `TRACELAKE_QUERY_EXPORT_QUOTA_FILES` (100) of them
at most, with `TRACELAKE_QUERY_EXPORT_QUOTA_BYTES`; all of them have `TRACELAKE_QUERY_EXPORT_TOTAL_BYTES`.

Examples:

    tracelake query-service --home ./home --port 8602

    TRACELAKE_CATALOG_DSN=postgresql://… TRACELAKE_AUDIT_DSN=postgresql://… tracelake query-service --slots 4
"""

_FACTS = ("TRACELAKE_CATALOG_DSN", "TRACELAKE_AUDIT_DSN")
_MAY_BE = ("TRACELAKE_READING_DSN", "TRACELAKE_OBJECT_ROOT", "TRACELAKE_INTERNAL_URL")
_EXPORT_ROOT = "TRACELAKE_EXPORT_ROOT"


def query_service(
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8602,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Queries that run at once.")] = 2,
    ready_file: Annotated[
        Path | None, typer.Option(help="Where the URL and the process id stand while it answers.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="json or text.")] = "json",
) -> None:
    from tracelake.worker.host.kernel import forbid_inspection

    forbid_inspection()
    from tracelake.dev.handle import DISPATCHER_FILE
    from tracelake.logs import configure_logs
    from tracelake.query.settings import QueryLimits, QuerySettings, tuned

    configure_logs("json" if log_format == "json" else "text")
    home = home.absolute()
    facts = _facts(home, os.environ)
    settings = QuerySettings(
        catalog_dsn=facts.catalog_dsn,
        audit_dsn=facts.audit_dsn,
        reading_dsn=facts.reading_dsn,
        object_root=facts.object_root,
        export_root=Path(os.environ.get(_EXPORT_ROOT) or home / "exports").absolute(),
        internal_url=facts.internal_url,
        dispatcher_file=home / DISPATCHER_FILE,
        host=host,
        port=port,
        slots=slots,
        limits=tuned(QueryLimits(), os.environ),
    )
    _serve(settings, ready_file)


query_service.__doc__ = HELP


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    catalog_dsn: Secret
    audit_dsn: Secret
    reading_dsn: Secret | None
    object_root: Path
    internal_url: str | None


def _facts(home: Path, environment: MutableMapping[str, str]) -> _Facts:
    """What is taken from the environment is taken out of it: no slot inherits it."""
    given = {name: environment.pop(name, "") for name in (*_FACTS, *_MAY_BE)}
    if not all(given[name] for name in _FACTS):
        return _of_home(home, [name for name in _FACTS if not given[name]])
    catalog, audit, reading, root, url = (given[name] for name in (*_FACTS, *_MAY_BE))
    return _Facts(
        catalog_dsn=Secret(catalog),
        audit_dsn=Secret(audit),
        reading_dsn=Secret(reading) if reading else None,
        object_root=Path(root).absolute() if root else home / "objects",
        internal_url=url or None,
    )


def _of_home(home: Path, missing: list[str]) -> _Facts:
    from tracelake.dev.home import Home
    from tracelake.dev.role_dsn import audit_dsn, catalog_dsn

    handle = stack_on(home, missing)
    passwords = Home(home).query_secrets()
    return _Facts(
        catalog_dsn=Secret(catalog_dsn(handle.state_dsn, passwords)),
        audit_dsn=Secret(audit_dsn(handle.state_dsn, passwords)),
        reading_dsn=Secret(handle.data_read_dsn),
        object_root=Path(handle.object_root),
        internal_url=handle.internal_url,
    )


def _serve(settings: QuerySettings, ready_file: Path | None) -> None:
    import asyncio

    import uvloop

    from tracelake.dev.handle import QueryHandle, write_handle
    from tracelake.query.app import run_query_service

    def ready(url: str) -> None:
        if ready_file is not None:
            write_handle(ready_file, QueryHandle(url, os.getpid()))
        typer.echo(f"ready  {url}")

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await run_query_service(settings, stop, ready)

    try:
        uvloop.run(main())
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
