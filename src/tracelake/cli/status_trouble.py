"""What needs a hand, at the end of the screen of ``tracelake status``, each with the command to go on with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from tracelake.cli.show import cell, counted, print_heading, print_table, scope

if TYPE_CHECKING:
    from tracelake.contracts.buffers import BufferSummary
    from tracelake.contracts.user_api import FailedDelivery, TaskSummary

_SHOWN = 10


def print_failed(tasks: Sequence[TaskSummary]) -> None:
    if not tasks:
        return
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
            for each in tasks[:_SHOWN]
        ],
        indent=2,
    )
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
    typer.echo("  next: tracelake outbox replay")
