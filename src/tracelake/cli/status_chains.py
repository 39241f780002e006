"""The chains on the screen of ``tracelake status``: how far their followers are, as these tell themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from tracelake.cli.show import cell, counted, print_heading, print_table

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.user_api import DagSummary, TaskSummary

_FOLLOWER = "block_follower"
_GENERATIONS = 20
_TOLD = ("head", "tip", "lag", "finalized", "reorgs", "deepest_reorg", "blocks_per_second", "eta_seconds")


def look_at_chains(client: Client, dags: Iterable[DagSummary]) -> list[dict[str, object]]:
    """One row per active follower. ``tip`` is the last block in the tables, ``lag`` how many the chain has beyond
    it. What stands there of a follower that doesn't run is old."""
    rows = []
    for dag in dags:
        for job in dag.jobs:
            if job.operator == _FOLLOWER:
                # One task per generation of the job; those of retired ones are canceled.
                tasks = client.tasks(dag=dag.dag_name, job=job.name, limit=_GENERATIONS).tasks
                task = next((each for each in tasks if each.status != "Canceled"), None)
                rows.append({"dag_name": dag.dag_name, "job": job.name, **_follower(task)})
    return rows


def _follower(task: TaskSummary | None) -> dict[str, object]:
    told: Mapping[str, Any] = (task.progress if task else None) or {}
    state = "stopped" if task is None else task.status.lower()
    if task is not None and task.status == "Running":
        state = str(told.get("problem") or told.get("message") or "starting")
    elif task is not None and task.error_message:
        state = f"{state}: {task.error_message}"
    return {
        "task_id": task.task_id if task else None,
        "running": task is not None and task.status == "Running",
        "state": state,
        **{name: told.get(name) for name in _TOLD},
    }


def print_chains(rows: list[dict[str, object]]) -> None:
    if not rows:
        return
    print_heading("chains")
    print_table(
        ("FOLLOWER", "HEAD", "IN TABLES", "LAG", "FINAL", "REORGS", "STATE"),
        [
            (
                f"{row['dag_name']}/{row['job']}",
                row["head"],
                row["tip"],
                _lag(row),
                row["finalized"],
                _reorgs(row),
                row["state"],
            )
            for row in rows
        ],
        indent=2,
    )
    if idle := [row for row in rows if not row["running"] and row["task_id"] is not None]:
        names = ", ".join(f"{row['dag_name']}/{row['job']}" for row in idle)
        typer.echo(f"  {names} doesn't run: tracelake task show {cell(idle[0]['task_id'])} says why")


def _lag(row: Mapping[str, object]) -> str | None:
    lag, eta = row["lag"], row["eta_seconds"]
    if not isinstance(lag, int):
        return None
    caught_up = f", {eta:.0f} s left" if isinstance(eta, int | float) else ""
    return counted(lag, "block") + caught_up


def _reorgs(row: Mapping[str, object]) -> str | None:
    reorgs, deepest = row["reorgs"], row["deepest_reorg"]
    if not isinstance(reorgs, int):
        return None
    return f"{reorgs} (deepest {deepest})" if reorgs else "0"
