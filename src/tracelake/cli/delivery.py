"""``tracelake delivery``: runs a delivery process, which sends rows of buffered datasets to receivers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tracelake.cli.service import (
    DATA_READ_DSN,
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

HELP = """Run a delivery process: it sends rows of buffered datasets to webhooks, chat and mail.

One process serves every delivery of every DAG; further ones take over when it releases them, and never send beside
it. Rows wait in their datasets while there is none (`tracelake deliveries list` shows how many). On a first signal
to stop (SIGTERM, Ctrl-C) it waits for the answers to what it is sending and releases its deliveries, on a second
one it releases them at once.

Addresses of the stack are read from the home of one that runs on this machine, or from the environment:
`TRACELAKE_INTERNAL_URL`, `TRACELAKE_WORKER_TOKEN`, `TRACELAKE_QUEUE_DSN` and `TRACELAKE_DATA_READ_DSN`, the role
that only reads (all four come before the home). Secrets that deliveries name are read from
`TRACELAKE_SECRET_<NAME>` or from the private file in `TRACELAKE_SECRETS_FILE`. Receivers are reached by TLS at
public addresses; `TRACELAKE_DELIVERY_ALLOW` lists hosts, as `host` or `host:port` with commas between, that may be
reached without.

It answers `/metrics` (Prometheus) and `/healthz` on a port of its own, and logs the address.

Examples:

    tracelake delivery

    TRACELAKE_DELIVERY_ALLOW=127.0.0.1:9000 tracelake delivery --home ./home --log-format text
"""

REQUIRED = (INTERNAL_URL, WORKER_CREDENTIAL, QUEUE_DSN, DATA_READ_DSN)
ALLOW_VARIABLE = "TRACELAKE_DELIVERY_ALLOW"
_SECRETS_FILE = "TRACELAKE_SECRETS_FILE"


def delivery(
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    drain_seconds: Annotated[
        float, typer.Option(min=0, max=86400, help="Maximum time to wait for answers, on a signal to stop.")
    ] = 20,
    worker_id: Annotated[
        str | None, typer.Option(help="Shown with its attempts.  [default: host and process]")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="File with the process id, there while the process takes deliveries.")
    ] = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    metrics_port: MetricsPortOption = 0,
    log_format: LogFormatOption = LogStyle.JSON,
) -> None:
    from tracelake.kernel import forbid_inspection

    # First: other processes of the same user must not read the secrets that follow.
    forbid_inspection()
    from tracelake.delivery.addresses import Allowance
    from tracelake.delivery.app import DeliverySettings, run_delivery
    from tracelake.leases.claim import new_worker_id
    from tracelake.serving.metrics_port import MetricsAddress
    from tracelake.tokens.named_secrets import SecretProvider

    write_logs(log_format)
    connection = ServiceConnection.from_env_or_home(home.absolute(), os.environ, REQUIRED)
    secrets_file = os.environ.pop(_SECRETS_FILE, "")
    settings = DeliverySettings(
        internal_url=given(connection.internal_url),
        worker_token=given(connection.worker_token),
        queue_dsn=given(connection.queue_dsn),
        data_read_dsn=given(connection.data_read_dsn),
        secrets=SecretProvider(os.environ, Path(secrets_file) if secrets_file else None),
        worker_id=worker_id or new_worker_id("delivery"),
        allowance=Allowance.parse(os.environ.get(ALLOW_VARIABLE, "")),
        drain_seconds=drain_seconds,
        metrics=MetricsAddress(metrics_host, metrics_port),
    )
    serve_tasks(
        lambda stop, stop_now, ready: run_delivery(settings, stop, stop_now, ready),
        settings.worker_id,
        ready_file,
    )


delivery.__doc__ = HELP
