"""``tracelake status``: shows on one screen how the stack is doing.

The chains come first, with the progress that their followers report; then jobs, tasks, datasets and buffers; at the
end everything that needs attention, each with the command to continue with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import typer

from tracelake.cli.deliveries import print_troubled, print_waiting_for_blocks
from tracelake.cli.show import cell, counted, pairs, print_heading, print_json, print_table, scope
from tracelake.cli.sources import print_without_ticks, without_ticks
from tracelake.cli.stack import DEFAULT_HOME, HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.stack_connection import DEV_FILE, read_handle

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.buffers import BufferPage, BufferSummary
    from tracelake.contracts.deliveries import DeliveryPage
    from tracelake.contracts.pressure import PressureReport
    from tracelake.contracts.sources import SourcePage
    from tracelake.contracts.user_api import (
        ChainStatus,
        DagPage,
        DatasetPage,
        FailedDeliveries,
        FailedDelivery,
        JobSummary,
        TaskPage,
        TaskSummary,
    )

# The largest page of the API: the command asks once for each list.
_COUNTED = 1000
_SHOWN = 10
_SHORT_WAIT = 10.0
"""Seconds; a task that waits for less is on its way."""
_NEED_A_LOOK = ("silent", "gone", "queued", "failed", "stopped")


class _MetricsHandle(TypedDict):
    """The fields of a home's handle file that say where metrics are."""

    user_url: str
    metrics: NotRequired[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Overview:
    """Pages of the API; of each state at most one page is counted."""

    now: datetime
    dags: DagPage
    chains: list[ChainStatus]
    queued: TaskPage
    running: TaskPage
    failed: TaskPage
    datasets: DatasetPage
    buffers: BufferPage
    deliveries: DeliveryPage
    undelivered: FailedDeliveries
    metrics: Mapping[str, str]
    pressure: PressureReport
    sources: SourcePage


def status(
    url: UrlOption = None, token: TokenOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Show on one screen how the stack is doing, and what needs attention.

    Chains with their head and how far the tables are behind it; jobs with what waits, runs and failed, and who
    paused them; jobs that are held by the pressure of others; sources whose schedules can't be used; running and
    failed tasks; the datasets' cursors; dead letters of buffered datasets; deliveries in trouble, and those that
    wait for a block to be final; outbox entries that were given up; where the parts of a stack here serve
    their metrics.

    Examples:

        tracelake status

        tracelake status --json
    """
    with connect(url, token, home) as client:
        # The stack's own clock: ages are counted from times that it wrote.
        now = client.check_ready() or datetime.now(UTC)
        found = _look(client, now, _metrics(client.url, home))
    if as_json:
        print_json({"url": client.url, "jobs": job_rows(found), **_lists(found)})
        return
    typer.echo(f"{client.url} is ready")
    print_chains(found.chains)
    _print_jobs(found)
    print_holds(found.pressure)
    print_without_ticks(found.sources)
    _print_running(found)
    _print_datasets(found)
    print_failed(found.failed.tasks, whole=found.failed.next is None)
    print_dead_letters(found.buffers.buffers)
    print_troubled(found.deliveries.deliveries)
    print_waiting_for_blocks(found.deliveries.deliveries)
    print_undelivered(found.undelivered.failed)
    if found.metrics:
        print_heading("metrics")
        print_table(("PART", "ADDRESS"), sorted(found.metrics.items()), indent=2)


def _metrics(url: str, home: Path | None) -> Mapping[str, str]:
    """Where the parts of a stack on this machine serve their metrics, by part; nothing for one elsewhere."""
    handle = read_handle((home or DEFAULT_HOME) / DEV_FILE, _MetricsHandle)
    return handle.get("metrics", {}) if handle is not None and handle["user_url"] == url else {}


def _look(client: Client, now: datetime, metrics: Mapping[str, str]) -> Overview:
    dags = client.dags(limit=_COUNTED)
    return Overview(
        now=now,
        dags=dags,
        chains=client.chains().chains,
        queued=client.tasks(status="Queued", limit=_COUNTED),
        running=client.tasks(status="Running", limit=_COUNTED),
        failed=client.tasks(status="Failed", limit=_COUNTED),
        datasets=client.datasets(limit=_COUNTED),
        buffers=client.buffers(),
        deliveries=client.deliveries(),
        undelivered=client.failed_deliveries(limit=_COUNTED),
        metrics=metrics,
        pressure=client.pressure(),
        sources=client.sources(),
    )


def job_rows(found: Overview) -> list[dict[str, object]]:
    """One row per active job, and one per retired job that still has tasks to show."""
    pages = {"queued": found.queued, "running": found.running, "failed": found.failed}
    counts = {
        state: Counter((task.dag_name, task.job) for task in page.tasks) for state, page in pages.items()
    }
    active = {(dag.dag_name, job.name): job for dag in found.dags.dags for job in dag.jobs}
    retired = {key for count in counts.values() for key in count} - set(active)
    # Lists are newest first, so the last one of a job is its oldest, if the list is whole.
    seen = found.queued.tasks if found.queued.next is None else []
    oldest = {(task.dag_name, task.job): task.ready_at for task in seen}
    rows: list[dict[str, object]] = []
    for key in [*active, *sorted(retired)]:
        job = active.get(key)
        state = "retired" if job is None else _state(job)
        rows.append(
            {
                "dag_name": key[0],
                "job": key[1],
                "operator": job.operator if job else None,
                "runtime": job.runtime if job else None,
                "state": state,
                "paused_by": job.paused_by if job else None,
                "paused_at": job.paused_at if job else None,
                "pause_causes": job.pause_causes if job else [],
                **{name: count[key] for name, count in counts.items()},
                "oldest_queued_seconds": _age(found.now, oldest.get(key)),
            }
        )
    return rows


def _state(job: JobSummary) -> str:
    if not job.paused:
        return "active"
    # Held jobs come back by themselves; what a person has paused doesn't.
    return "paused" if "person" in job.pause_causes or not job.pause_causes else "held"


def _age(now: datetime, since: datetime | None) -> float | None:
    return max(0.0, (now - since).total_seconds()) if since is not None else None


def _lists(found: Overview) -> dict[str, object]:
    return {
        "chains": found.chains,
        "running": found.running.tasks,
        "failed": found.failed.tasks,
        "datasets": found.datasets.datasets,
        "buffers": found.buffers.buffers,
        "deliveries": found.deliveries.deliveries,
        "undelivered": found.undelivered.failed,
        "metrics": found.metrics,
        "pressure": found.pressure,
        "sources_without_ticks": without_ticks(found.sources),
        "complete": all(page.next is None for page in (found.queued, found.running, found.failed)),
    }


def _print_jobs(found: Overview) -> None:
    rows = job_rows(found)
    if not rows:
        typer.echo("no DAG is deployed: tracelake deploy FILE")
        return
    print_heading("jobs")
    print_table(
        ("JOB", "OPERATOR", "RUNTIME", "STATE", "QUEUED", "OLDEST", "RUNNING", "FAILED"),
        [
            (
                f"{row['dag_name']}/{row['job']}",
                *(row[name] for name in ("operator", "runtime", "state", "queued")),
                _seconds(row["oldest_queued_seconds"]),
                *(row[name] for name in ("running", "failed")),
            )
            for row in rows
        ],
        indent=2,
    )
    for row in rows:
        if row["state"] == "paused":
            name = f"{row['dag_name']}/{row['job']}"
            by = f" by {cell(row['paused_by'])} at {cell(row['paused_at'])}" if row["paused_by"] else ""
            causes = row["pause_causes"]
            others = [cause for cause in causes if cause != "person"] if isinstance(causes, list) else []
            why = f" (cause: {', '.join(map(cell, others))})" if others else ""
            typer.echo(f"  {name} is paused{by}{why}: tracelake resume {name}")
    for line in waiting_lines(found.now, found.queued.tasks):
        typer.echo(f"  {line}")
    pages = {"queued": found.queued, "running": found.running, "failed": found.failed}
    if cut := [name for name, page in pages.items() if page.next is not None]:
        typer.echo(f"  there are more than {_COUNTED:,} {' and '.join(cut)}: only the newest are counted")


def print_holds(pressure: PressureReport) -> None:
    if not pressure.holds and not pressure.backlogs:
        return
    print_heading("held by backpressure")
    for message in (
        *(hold.message for hold in pressure.holds),
        *(kept.message for kept in pressure.backlogs),
    ):
        typer.echo(f"  {cell(message)}")


def waiting_lines(now: datetime, queued: Sequence[TaskSummary]) -> list[str]:
    """Why the oldest task of each job waits, if it has waited for a while; pauses and holds are shown as such."""
    # Lists are newest first.
    oldest = {(task.dag_name, task.job): task for task in queued}
    found = []
    for (dag, job), task in sorted(oldest.items()):
        waiting = task.waiting_for
        if waiting is None or waiting.reason in ("JobPaused", "Backpressure"):
            continue
        if (_age(now, task.ready_at) or 0.0) >= _SHORT_WAIT or waiting.reason == "RetryTime":
            found.append(f"{dag}/{job} waits: {cell(waiting.message)}")
    if len(found) > _SHOWN:
        found[_SHOWN:] = [f"and {len(found) - _SHOWN:,} more jobs wait: tracelake tasks --status queued"]
    return found


def _seconds(value: object) -> str | None:
    return f"{value:,.0f} s" if isinstance(value, float) else None


def _print_running(found: Overview) -> None:
    """Print running tasks without sources: those always run, and a follower is shown as a chain already."""
    running = [task for task in found.running.tasks if task.kind != "source"]
    if not running:
        return
    print_heading("running")
    print_table(
        ("TASK", "JOB", "SCOPE", "ATTEMPT", "WORKER", "PROGRESS"),
        [
            (
                each.task_id,
                f"{each.dag_name}/{each.job}",
                scope(each.start, each.end),
                each.attempt,
                each.worker_id,
                pairs(each.progress),
            )
            for each in running[:_SHOWN]
        ],
        indent=2,
    )
    if len(running) > _SHOWN:
        at_least = "" if found.running.next is None else "at least "
        typer.echo(f"  and {at_least}{len(running) - _SHOWN:,} more: tracelake tasks --status running")


def _print_datasets(found: Overview) -> None:
    published = [each for each in found.datasets.datasets if each.dataset is not None]
    if not published:
        return
    print_heading("datasets")
    print_table(
        ("DATASET", "STORAGE", "REVISION", "CURSOR"),
        [(each.dataset, each.storage, each.revision, each.cursor) for each in published[:_SHOWN]],
        indent=2,
    )
    if len(published) > _SHOWN:
        typer.echo(f"  and {len(published) - _SHOWN} more: tracelake datasets")


def print_chains(rows: Sequence[ChainStatus]) -> None:
    if not rows:
        return
    print_heading("chains")
    print_table(
        ("FOLLOWER", "HEAD", "IN TABLES", "LAG", "FINAL", "REORGS", "KNOWN", "STATE"),
        [
            (
                f"{row.dag_name}/{row.job}",
                row.head,
                row.tip,
                _lag(row),
                row.finalized,
                _reorgs(row),
                _known(row),
                row.state,
            )
            for row in rows
        ],
        indent=2,
    )
    for row in rows:
        if row.last_error is not None and row.last_error not in row.state:
            since = f", since {cell(row.last_error_since)}" if row.last_error_since is not None else ""
            typer.echo(f"  {row.dag_name}/{row.job}: {cell(row.last_error)}{since}")
        if row.endpoint_problems is not None:
            typer.echo(f"  {row.dag_name}/{row.job}: {cell(row.endpoint_problems)}: tracelake rpc status")
    if idle := [row for row in rows if row.condition in _NEED_A_LOOK and row.task_id is not None]:
        names = ", ".join(f"{row.dag_name}/{row.job}" for row in idle)
        typer.echo(f"  {names} follows nothing: tracelake task show {cell(idle[0].task_id)} says why")


def _lag(row: ChainStatus) -> str | None:
    if not isinstance(row.lag, int):
        return None
    seconds = f" ({row.lag_seconds:,.0f} s)" if row.lag_seconds is not None else ""
    left = f", {row.eta_seconds:.0f} s left" if row.eta_seconds is not None else ""
    return counted(row.lag, "block") + seconds + left


def _known(row: ChainStatus) -> str | None:
    """The age of all numbers in the row."""
    return None if row.known_age_seconds is None else f"{row.known_age_seconds:,.0f} s ago"


def _reorgs(row: ChainStatus) -> str | None:
    if not isinstance(row.reorgs, int):
        return None
    return f"{row.reorgs} (deepest {row.deepest_reorg})" if row.reorgs else "0"


def print_failed(tasks: Sequence[TaskSummary], *, whole: bool = True) -> None:
    """Print what failed last. A list is newest first by creation, and a source's task is as old as its job.
    ``whole``: there are no others."""
    if not tasks:
        return
    last = sorted(tasks, key=lambda each: each.ended_at or each.created_at, reverse=True)
    print_heading("failed")
    print_table(
        ("TASK", "JOB", "SCOPE", "ENDED", "ERROR"),
        [
            (
                each.task_id,
                f"{each.dag_name}/{each.job}",
                scope(each.start, each.end),
                each.ended_at,
                each.error_message,
            )
            for each in last[:_SHOWN]
        ],
        indent=2,
    )
    if (more := len(tasks) - _SHOWN) > 0:
        typer.echo(f"  and {'' if whole else 'at least '}{more:,} more: tracelake tasks --status failed")
    typer.echo("  next: tracelake task show TASK, tracelake explain TASK, tracelake retry TASK")


def print_dead_letters(buffers: Iterable[BufferSummary]) -> None:
    dead = [each for each in buffers if each.dead_letters]
    if not dead:
        return
    print_heading("dead letters")
    for each in dead:
        name = each.dataset if each.published else each.dataset_uuid
        typer.echo(f"  {counted(each.dead_letters, 'dead letter')} of {each.dataset}")
        typer.echo(f"  next: tracelake buffers show {name}")


def print_undelivered(failed: Sequence[FailedDelivery]) -> None:
    if not failed:
        return
    print_heading("given up deliveries")
    for each in failed[:_SHOWN]:
        typer.echo(f"  {each.outbox_id}  {each.kind} to {each.runtime}: {cell(each.last_error)}")
    if len(failed) > _SHOWN:
        typer.echo(f"  and {len(failed) - _SHOWN:,} more: tracelake outbox failed")
    typer.echo("  next: tracelake outbox replay")
