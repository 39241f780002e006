"""``tracelake status``: one screen on how the stack is doing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from tracelake.cli.show import cell, pairs, print_heading, print_json, print_table, scope
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.cli.status_chains import look_at_chains, print_chains
from tracelake.cli.status_trouble import print_dead_letters, print_failed, print_undelivered

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.buffers import BufferPage
    from tracelake.contracts.user_api import DagPage, DatasetPage, FailedDeliveries, TaskPage

_COUNTED = 1000
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Overview:
    """Pages as the API gave them; of each state at most a page is counted."""

    now: datetime
    dags: DagPage
    chains: list[dict[str, object]]
    queued: TaskPage
    running: TaskPage
    failed: TaskPage
    datasets: DatasetPage
    buffers: BufferPage
    undelivered: FailedDeliveries


def status(
    url: UrlOption = None, token: TokenOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Show on one screen how the stack is doing, and what needs a hand.

    Chains with their head and how far the tables are behind it; jobs with what waits, runs and failed, and who
    paused them; running and failed tasks; the datasets' cursors; dead letters of buffered datasets;
    deliveries that were given up.

    Examples:

        tracelake status

        tracelake status --json
    """
    with connect(url, token, home) as client:
        now = client.check_ready() or datetime.now(UTC)
        found = _look(client, now)
    if as_json:
        print_json({"url": client.url, "jobs": job_rows(found), **_lists(found)})
        return
    typer.echo(f"{client.url} is ready")
    print_chains(found.chains)
    _print_jobs(found)
    _print_running(found)
    _print_datasets(found)
    print_failed(found.failed.tasks)
    print_dead_letters(found.buffers.buffers)
    print_undelivered(found.undelivered.failed)


def _look(client: Client, now: datetime) -> Overview:
    dags = client.dags(limit=_COUNTED)
    return Overview(
        now=now,
        dags=dags,
        chains=look_at_chains(client, dags.dags),
        queued=client.tasks(status="Queued", limit=_COUNTED),
        running=client.tasks(status="Running", limit=_COUNTED),
        failed=client.tasks(status="Failed", limit=_COUNTED),
        datasets=client.datasets(limit=_COUNTED),
        buffers=client.buffers(),
        undelivered=client.failed_deliveries(limit=_COUNTED),
    )


def job_rows(found: Overview) -> list[dict[str, object]]:
    """One row per active job, and one per retired job that still has tasks to speak of."""
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
        state = "retired" if job is None else "paused" if job.paused else "active"
        rows.append(
            {
                "dag_name": key[0],
                "job": key[1],
                "operator": job.operator if job else None,
                "runtime": job.runtime if job else None,
                "state": state,
                "paused_by": job.paused_by if job else None,
                "paused_at": job.paused_at if job else None,
                **{name: count[key] for name, count in counts.items()},
                "oldest_queued_seconds": _age(found.now, oldest.get(key)),
            }
        )
    return rows


def _age(now: datetime, since: datetime | None) -> float | None:
    return max(0.0, (now - since).total_seconds()) if since is not None else None


def _lists(found: Overview) -> dict[str, object]:
    return {
        "chains": found.chains,
        "running": found.running.tasks,
        "failed": found.failed.tasks,
        "datasets": found.datasets.datasets,
        "buffers": found.buffers.buffers,
        "undelivered": found.undelivered.failed,
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
            typer.echo(f"  {name} is paused{by}: tracelake resume {name}")
    pages = {"queued": found.queued, "running": found.running, "failed": found.failed}
    if cut := [name for name, page in pages.items() if page.next is not None]:
        typer.echo(f"  there are more than {_COUNTED:,} {' and '.join(cut)}: only the newest are counted")


def _seconds(value: object) -> str | None:
    return f"{value:,.0f} s" if isinstance(value, float) else None


def _print_running(found: Overview) -> None:
    """Sources always run, and a follower is on the screen as a chain already."""
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
        typer.echo(f"  and {len(running) - _SHOWN} more: tracelake tasks --status running")


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
