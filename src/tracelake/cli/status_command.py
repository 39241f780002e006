"""``tracelake status``: one screen on how the stack is doing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from tracelake.cli.show import cell, print_heading, print_json, print_table, scope
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.user_api import DagPage, DatasetPage, FailedDeliveries, TaskPage

_COUNTED = 1000
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Overview:
    """Pages as the API gave them; of each state at most a page is counted."""

    dags: DagPage
    queued: TaskPage
    running: TaskPage
    failed: TaskPage
    datasets: DatasetPage
    undelivered: FailedDeliveries


def status(
    url: UrlOption = None, token: TokenOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Show jobs with what waits, runs and failed, the datasets' cursors, and what needs a hand.

    Examples:

        tracelake status

        tracelake status --json
    """
    with connect(url, token, home) as client:
        client.check_ready()
        found = _look(client)
    if as_json:
        print_json({"url": client.url, "jobs": job_rows(found), **_lists(found)})
        return
    typer.echo(f"{client.url} is ready")
    _print_jobs(found)
    _print_datasets(found)
    _print_trouble(found)


def _look(client: Client) -> Overview:
    return Overview(
        dags=client.dags(limit=_COUNTED),
        queued=client.tasks(status="Queued", limit=_COUNTED),
        running=client.tasks(status="Running", limit=_COUNTED),
        failed=client.tasks(status="Failed", limit=_COUNTED),
        datasets=client.datasets(limit=_COUNTED),
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
                **{name: count[key] for name, count in counts.items()},
            }
        )
    return rows


def _lists(found: Overview) -> dict[str, object]:
    return {
        "running": found.running.tasks,
        "failed": found.failed.tasks,
        "datasets": found.datasets.datasets,
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
        ("JOB", "OPERATOR", "RUNTIME", "STATE", "QUEUED", "RUNNING", "FAILED"),
        [
            (
                f"{row['dag_name']}/{row['job']}",
                *(row[name] for name in ("operator", "runtime", "state", "queued", "running", "failed")),
            )
            for row in rows
        ],
        indent=2,
    )
    pages = {"queued": found.queued, "running": found.running, "failed": found.failed}
    if cut := [name for name, page in pages.items() if page.next is not None]:
        typer.echo(f"  there are more than {_COUNTED:,} {' and '.join(cut)}: only the newest are counted")


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


def _print_trouble(found: Overview) -> None:
    if found.failed.tasks:
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
                for each in found.failed.tasks[:_SHOWN]
            ],
            indent=2,
        )
        typer.echo("  next: tracelake task show TASK, tracelake retry TASK")
    if found.undelivered.failed:
        print_heading("given up deliveries")
        for each in found.undelivered.failed[:_SHOWN]:
            typer.echo(f"  {each.outbox_id}  {each.kind} to {each.runtime}: {cell(each.last_error)}")
        typer.echo("  next: tracelake outbox replay")
