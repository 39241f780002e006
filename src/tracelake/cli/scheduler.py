"""``tracelake scheduler``: runs a scheduler, which makes the ticks of cron sources."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tracelake.cli.service import (
    INTERNAL_URL,
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

HELP = """Run a scheduler: it evaluates the schedules of cron sources and makes their ticks.

Any number may run: one acts, and another takes its place within ten seconds when it is gone, or at once when it
stops in order. Each tick exists once, whatever restarts, overlaps or is late. Missed ticks are made up for as each
source's `catch_up` says.

The Dispatcher's address is read from the home of a stack that runs on this machine, or from the environment:
`TRACELAKE_INTERNAL_URL` and `TRACELAKE_WORKER_TOKEN` (both come before the home). A scheduler needs no database.

Examples:

    tracelake scheduler

    tracelake scheduler --home ./home --log-format text
"""

REQUIRED = (INTERNAL_URL, WORKER_CREDENTIAL)


def scheduler(
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    poll_seconds: Annotated[
        float,
        typer.Option(min=0.1, max=8, help="Maximum time until a newly deployed schedule is noticed."),
    ] = 3,
    scheduler_id: Annotated[
        str | None, typer.Option(help="Shown in logs.  [default: host and process]")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="File with the process id, there while the scheduler runs.")
    ] = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    metrics_port: MetricsPortOption = 0,
    log_format: LogFormatOption = LogStyle.JSON,
) -> None:
    from tracelake.kernel import forbid_inspection

    # First: other processes of the same user must not read the token that follows.
    forbid_inspection()
    from tracelake.leases.claim import new_worker_id
    from tracelake.scheduler.app import SchedulerSettings, run_scheduler
    from tracelake.serving.metrics_port import MetricsAddress

    write_logs(log_format)
    connection = ServiceConnection.from_env_or_home(home.absolute(), os.environ, REQUIRED)
    settings = SchedulerSettings(
        internal_url=given(connection.internal_url),
        worker_token=given(connection.worker_token),
        scheduler_id=scheduler_id or new_worker_id("scheduler"),
        poll_seconds=poll_seconds,
        metrics=MetricsAddress(metrics_host, metrics_port),
    )
    serve_tasks(
        lambda stop, stop_now, ready: run_scheduler(settings, stop, ready), settings.scheduler_id, ready_file
    )


scheduler.__doc__ = HELP
