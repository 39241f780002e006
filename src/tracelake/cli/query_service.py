"""``tracelake query-service``: runs the Query Service, which answers SQL over datasets for people and tasks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.service import (
    AUDIT_DSN,
    CATALOG_DSN,
    LogFormatOption,
    LogStyle,
    MetricsHostOption,
    MetricsPortOption,
    ServiceConnection,
    given,
    serve,
    write_logs,
)
from tracelake.cli.stack import DEFAULT_HOME
from tracelake.stack_connection import DISPATCHER_FILE, QUERY_PORT

if TYPE_CHECKING:
    from tracelake.query.settings import QuerySettings

HELP = """Run the Query Service: it answers one SELECT at a time over datasets, and gives no access to anything
else.

It listens where tasks reach it (`/v1/task/query`) and the Dispatcher's user port, which passes `/v1/query` on to it
(`tracelake dispatcher --query-url`). Each query runs in a process of its own, without network and files, within
limits; one over its time is killed. Without bubblewrap and without Landlock (Linux 5.13) it refuses to start;
`TRACELAKE_QUERY_UNCONFINED=1` runs queries nevertheless.

Addresses of the stack are read from the home of one that runs on this machine, or from the environment:
`TRACELAKE_CATALOG_DSN` and `TRACELAKE_AUDIT_DSN` (both come before the home), and `TRACELAKE_DATA_READ_DSN` for hot
tables, `TRACELAKE_OBJECTS`, and `TRACELAKE_INTERNAL_URL` (without it, the address
in the Dispatcher's own file in the home is used). It starts before any of them is there; `/readyz` lists what is
missing.

Limits of one query come from the environment: `TRACELAKE_QUERY_SECONDS` (30), `TRACELAKE_QUERY_MEMORY_BYTES`,
`TRACELAKE_QUERY_SPILL_BYTES`, `TRACELAKE_QUERY_THREADS`, `TRACELAKE_QUERY_DEFAULT_ROWS` (10000),
`TRACELAKE_QUERY_MAX_ROWS` (1000000), `TRACELAKE_QUERY_RESULT_BYTES`, `TRACELAKE_QUERY_EXPORT_BYTES`; and the time
that a query waits for a slot, and the number that may wait: `TRACELAKE_QUERY_WAIT_SECONDS` (10),
`TRACELAKE_QUERY_QUEUE` (64).

Exported files lie in `exports` of the home (`TRACELAKE_EXPORT_ROOT`), which is the service's own, and are removed
after `TRACELAKE_QUERY_EXPORT_HOURS` (24). One user or task has `TRACELAKE_QUERY_EXPORT_QUOTA_FILES` (100) of them
at most, with `TRACELAKE_QUERY_EXPORT_QUOTA_BYTES`; all of them have `TRACELAKE_QUERY_EXPORT_TOTAL_BYTES`.

Examples:

    tracelake query-service --home ./home --port 8602

    TRACELAKE_CATALOG_DSN=postgresql://… TRACELAKE_AUDIT_DSN=postgresql://… tracelake query-service --slots 4
"""

_REQUIRED = (CATALOG_DSN, AUDIT_DSN)
_EXPORT_ROOT = "TRACELAKE_EXPORT_ROOT"


def query_service(
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = QUERY_PORT,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Queries that run at once.")] = 2,
    ready_file: Annotated[
        Path | None, typer.Option(help="File with the URL and the process id, there while it answers.")
    ] = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    metrics_port: MetricsPortOption = 0,
    log_format: LogFormatOption = LogStyle.JSON,
) -> None:
    from tracelake.kernel import forbid_inspection

    # First: other processes of the same user must not read the secrets that follow.
    forbid_inspection()
    from tracelake.query.settings import QueryLimits, QuerySettings, tuned
    from tracelake.serving.metrics_port import MetricsAddress

    write_logs(log_format)
    home = home.absolute()
    connection = ServiceConnection.from_env_or_home(home, os.environ, _REQUIRED)
    settings = QuerySettings(
        catalog_dsn=given(connection.catalog_dsn),
        audit_dsn=given(connection.audit_dsn),
        data_read_dsn=connection.data_read_dsn,
        objects=connection.objects,
        export_root=Path(os.environ.get(_EXPORT_ROOT) or home / "exports").absolute(),
        internal_url=connection.internal_url,
        dispatcher_file=home / DISPATCHER_FILE,
        host=host,
        port=port,
        slots=slots,
        metrics=MetricsAddress(metrics_host, metrics_port),
        limits=tuned(QueryLimits(), os.environ),
    )
    _serve(settings, ready_file)


query_service.__doc__ = HELP


def _serve(settings: QuerySettings, ready_file: Path | None) -> None:
    from tracelake.dev.handle import QueryHandle, write_handle
    from tracelake.query.app import run_query_service

    def ready(url: str) -> None:
        if ready_file is not None:
            write_handle(ready_file, QueryHandle(url, os.getpid()))
        typer.echo(f"ready  {url}")

    try:
        serve(lambda stop, _hurry: run_query_service(settings, stop, ready))
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
