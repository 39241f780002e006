"""``tracelake sink``: runs a sink, which writes the records that jobs publish to buffered datasets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tracelake.cli.service import (
    DATA_WRITE_DSN,
    INTERNAL_URL,
    QUEUE_DSN,
    WORKER_CREDENTIAL,
    LogFormatOption,
    LogStyle,
    MetricsHostOption,
    MetricsPortOption,
    ServiceConnection,
    given,
    serve_tasks,
    write_logs,
)
from tracelake.cli.stack import DEFAULT_HOME

HELP = """Run a sink: it writes the records that jobs publish to buffered datasets into their tables.

One sink serves every buffered dataset; further ones take over when it releases them, and never write beside it.
Records wait in their queues while there is none (`tracelake buffers list` shows how many, and since when). A batch
that can't be written becomes a dead letter with its reason, and the others go on. On a first signal to stop
(SIGTERM, Ctrl-C) it writes what it has received and releases its datasets, on a second one it releases them at
once.

Addresses of the stack are read from the home of one that runs on this machine, or from the environment:
`TRACELAKE_INTERNAL_URL`, `TRACELAKE_WORKER_TOKEN`, `TRACELAKE_QUEUE_DSN` and `TRACELAKE_DATA_WRITE_DSN`, the role
that commits (all four come before the home), and `TRACELAKE_OBJECTS`, where large batches lie.

It answers `/metrics` (Prometheus) and `/healthz` on a port of its own, and logs the address.

Examples:

    tracelake sink

    tracelake sink --home ./home --log-format text
"""

REQUIRED = (INTERNAL_URL, WORKER_CREDENTIAL, QUEUE_DSN, DATA_WRITE_DSN)


def sink(
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    drain_seconds: Annotated[
        float,
        typer.Option(min=0, max=86400, help="Maximum time to write what was received, on a signal to stop."),
    ] = 5,
    worker_id: Annotated[
        str | None, typer.Option(help="Shown with its attempts.  [default: host and process]")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="File with the process id, there while the sink takes datasets.")
    ] = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    metrics_port: MetricsPortOption = 0,
    log_format: LogFormatOption = LogStyle.JSON,
) -> None:
    from tracelake.kernel import forbid_inspection

    # First: other processes of the same user must not read the secrets that follow.
    forbid_inspection()
    from tracelake.leases.claim import new_worker_id
    from tracelake.serving.metrics_port import MetricsAddress
    from tracelake.sink.app import SinkSettings

    write_logs(log_format)
    connection = ServiceConnection.from_env_or_home(home.absolute(), os.environ, REQUIRED)
    settings = SinkSettings(
        internal_url=given(connection.internal_url),
        worker_token=given(connection.worker_token),
        queue_dsn=given(connection.queue_dsn),
        data_write_dsn=given(connection.data_write_dsn),
        objects=connection.objects,
        worker_id=worker_id or new_worker_id("sink"),
        drain_seconds=drain_seconds,
        metrics=MetricsAddress(metrics_host, metrics_port),
    )
    from tracelake.sink.app import run_sink

    serve_tasks(
        lambda stop, stop_now, ready: run_sink(settings, stop, stop_now, ready),
        settings.worker_id,
        ready_file,
    )


sink.__doc__ = HELP
