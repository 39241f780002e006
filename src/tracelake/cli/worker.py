"""``tracelake worker``: runs a worker, which takes tasks of one runtime and runs their operators."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from tracelake.cli.rpc import POOLS_FILE, POOLS_VARIABLE
from tracelake.cli.service import (
    INTERNAL_URL,
    QUEUE_DSN,
    WORKER_CREDENTIAL,
    LogFormatOption,
    LogStyle,
    MetricsHostOption,
    MetricsPortOption,
    ServiceConnection,
    given,
    operators_at,
    serve_tasks,
    write_logs,
)
from tracelake.cli.stack import DEFAULT_HOME, LONGEST_SECONDS
from tracelake.domain.duration import parse_duration
from tracelake.domain.errors import Invalid
from tracelake.domain.runtimes import DISPATCHER

HELP = """Run a worker: it waits for tasks of its runtime, runs their operators and reports the results.

Any number of workers may serve one runtime, on any number of machines. On a first signal to
stop (SIGTERM, Ctrl-C) a worker finishes its tasks or releases them, on a second one it releases them at once.

Addresses of the stack are read from the home of one that runs on this machine, or from the environment:
`TRACELAKE_INTERNAL_URL`, `TRACELAKE_WORKER_TOKEN` and `TRACELAKE_QUEUE_DSN` (all three come before the home), and
`TRACELAKE_DATA_WRITE_DSN`, `TRACELAKE_DATA_ADDRESS` (`host:port` for operators, when the worker itself goes by a
unix socket that they can't reach), `TRACELAKE_QUERY_URL`, `TRACELAKE_OBJECTS`. Secrets that jobs name are read from
`TRACELAKE_SECRET_<NAME>` or from the private file in `TRACELAKE_SECRETS_FILE`. RPC pools are read from the file in
`TRACELAKE_RPC_POOLS`, or from `rpc.toml` in the home.

It answers `/metrics` (Prometheus) and `/healthz` on a port of its own, and logs the address.

Examples:

    tracelake worker --runtime ecs_python

    tracelake worker --runtime ecs_spark --home ./home --concurrency 4 --idle-timeout 10m

    tracelake worker --runtime ecs_python --operators my_company.operators --operators ./extra_operator.py
"""
_REQUIRED = (INTERNAL_URL, WORKER_CREDENTIAL, QUEUE_DSN)
_SECRETS_FILE = "TRACELAKE_SECRETS_FILE"


def worker(
    runtime: Annotated[
        str, typer.Option(help="ecs_python, ecs_spark, lambda, or the name of a registered one.")
    ],
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine; logs go there too.")
    ] = DEFAULT_HOME,
    queue: Annotated[
        str | None, typer.Option(help="The runtime's queue.  [default: the runtime's name]")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="Operators that run at once.")] = 2,
    idle_timeout: Annotated[
        str | None, typer.Option(help="End after this time without work, as in 30s or 10m.  [default: never]")
    ] = None,
    operators: Annotated[
        list[str] | None,
        typer.Option(help="Load operators from this module or .py file as well. Repeatable."),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option(min=0, max=86400, help="Maximum time for running tasks to finish, on a signal to stop."),
    ] = 30,
    worker_id: Annotated[
        str | None, typer.Option(help="Shown with its attempts.  [default: runtime, host and process]")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="File with the process id, there while the worker takes tasks.")
    ] = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    metrics_port: MetricsPortOption = 0,
    log_format: LogFormatOption = LogStyle.JSON,
) -> None:
    from tracelake.kernel import forbid_inspection

    # First: the secrets that are read below must not be readable by operators of the same user.
    forbid_inspection()
    from tracelake.dev.home import make_home
    from tracelake.leases.claim import new_worker_id
    from tracelake.serving.metrics_port import MetricsAddress
    from tracelake.worker.settings import WorkerSettings

    write_logs(log_format)
    if runtime == DISPATCHER:
        raise Invalid("InvalidRuntime", f"tasks of runtime {DISPATCHER} are run by the Dispatcher itself")
    idle = None if idle_timeout is None else _seconds(idle_timeout)
    home = home.absolute()
    connection = ServiceConnection.from_env_or_home(home, os.environ, _REQUIRED)
    # Removed as well, so that operators don't inherit them.
    rpc_pools = os.environ.pop(POOLS_VARIABLE, "")
    secrets_file = os.environ.pop(_SECRETS_FILE, "")
    name = worker_id or new_worker_id(runtime)
    settings = WorkerSettings(
        runtime=runtime,
        internal_url=given(connection.internal_url),
        worker_token=given(connection.worker_token),
        queue_dsn=given(connection.queue_dsn),
        queue=queue or runtime,
        data_write_dsn=connection.data_write_dsn,
        data_address=connection.data_address,
        query_url=connection.query_url,
        objects=connection.objects,
        log_folder=home / "logs" / "tasks",
        work_folder=work_folder(home, runtime, name),
        home=home,
        concurrency=concurrency,
        idle_timeout=idle,
        drain_seconds=drain_seconds,
        operators=tuple(dict.fromkeys((*connection.operators, *map(operators_at, operators or ())))),
        worker_id=name,
        secrets_file=Path(secrets_file) if secrets_file else None,
        rpc_pools=Path(rpc_pools).absolute() if rpc_pools else home / POOLS_FILE,
        rpc_pools_required=bool(rpc_pools),
        metrics=MetricsAddress(metrics_host, metrics_port),
    )
    make_home(home)
    from tracelake.worker.app import run_worker

    serve_tasks(lambda stop, stop_now, ready: run_worker(settings, stop, stop_now, ready), name, ready_file)


worker.__doc__ = HELP


def _seconds(text: str) -> float:
    seconds = parse_duration(text.strip(), bare=True)
    if seconds is None:
        raise Invalid("InvalidDuration", f"--idle-timeout takes seconds or 30s, 10m, 2h, 1d, not {text!r}")
    if seconds > LONGEST_SECONDS:
        raise Invalid(
            "InvalidDuration", f"--idle-timeout {text}: the most is {LONGEST_SECONDS} seconds (365d)"
        )
    return seconds


def work_folder(home: Path, runtime: str, worker_id: str) -> Path:
    """The worker's own folder, two levels below ``work``: a start removes what others left beside it."""
    # A leading dot too: ``..`` would be the folder above, with everything in it.
    names = (re.sub(r"^\.|[^A-Za-z0-9._-]", "-", text) for text in (runtime, worker_id))
    return home.joinpath("work", *names)
