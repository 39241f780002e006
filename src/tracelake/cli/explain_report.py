"""What ``tracelake explain`` prints for people: a tree from a task back to its sources, or who made a range."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from tracelake.cli.show import cell, counted, print_fields, print_heading, print_table, scope
from tracelake.contracts.explain import (
    Cause,
    ExplainedTask,
    Handover,
    RangeExplanation,
    RangePiece,
    TakenBack,
    TaskExplanation,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIDE = 1000
_COLOURS = {"Completed": "green", "Failed": "red", "Canceled": "yellow", "Running": "cyan"}
_BECAUSE = {
    "reconcile": "found missing by the reconciler",
    "invalidation": "to be made again after it was taken back",
    "deploy": "started by a deploy",
    "monitor": "started by the source monitor",
}


def print_explanation(found: TaskExplanation | RangeExplanation) -> None:
    if isinstance(found, TaskExplanation):
        _print_task(found)
    else:
        _print_range(found)


def _print_task(found: TaskExplanation) -> None:
    tasks = {each.task_id: each for each in found.tasks}
    tree = Tree(_task_label(found.tasks[0]), guide_style="dim")
    _grow(tree, found.tasks[0], tasks, {found.task_id})
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    with console.capture() as captured:
        console.print(tree)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
    if found.waiting_for is not None:
        typer.echo(f"it waits: {cell(found.waiting_for.message)}")
    if found.seconds is not None:
        typer.echo(f"{_duration(found.seconds)} from the first event to the last hand-over")
    if found.unexplored:
        tasks_left = counted(len(found.unexplored), "task")
        typer.echo(f"{tasks_left} further back left out: tracelake explain {found.unexplored[0]}")


def _grow(branch: Tree, task: ExplainedTask, tasks: Mapping[UUID, ExplainedTask], told: set[UUID]) -> None:
    for cause in task.causes:
        twig = branch.add(_cause_label(cause))
        behind = tasks.get(cause.task_id) if cause.task_id is not None else None
        if behind is None:
            continue
        if behind.task_id in told:
            twig.add(Text(f"{behind.dag_name}/{behind.job}, task {behind.task_id}: told above", "dim"))
            continue
        told.add(behind.task_id)
        _grow(twig.add(_task_label(behind)), behind, tasks, told)


def _task_label(task: ExplainedTask) -> Text:
    label = Text()
    label.append(f"{task.dag_name}/{task.job}", "bold")
    if (span := scope(task.start, task.end)) is not None:
        label.append(f" {span}")
    label.append("  ")
    label.append(task.status, _COLOURS.get(task.status, ""))
    label.append(f"  {task.operator} on {task.runtime}, task {task.task_id}", "dim")
    if task.because in _BECAUSE:
        label.append(f"\n{_BECAUSE[task.because]}", "dim")
    if task.taken_back is not None:
        label.append(f"\n{_taken_back(task.taken_back)}", "yellow")
    for each in task.handovers:
        label.append("\n")
        label.append(_handover(each))
    if task.error_message:
        label.append(f"\n{cell(task.error_message)}", "red")
    return label


def _handover(each: Handover) -> Text:
    waited = f"+{_duration(each.seconds)}" if each.seconds is not None else ""
    return Text(f"{_moment(each.at)}  {waited:>10}  {cell(each.what)}")


def _cause_label(cause: Cause) -> Text:
    name = f"{cause.dag_name}/{cause.job}" if cause.job else cause.dag_name
    dataset = f"{name}/{cause.output_name}" + (f" ({cause.dataset})" if cause.dataset else "")
    label = Text("because of ")
    if cause.taken_back is not None:
        label.append(_taken_back(cause.taken_back), "yellow")
    if cause.event_id is not None:
        start = cause.event_start if cause.event_kind == "partition" else None
        label.append(" and " if cause.taken_back else "")
        label.append(f"event {cause.event_id}: {dataset} {scope(start, cause.event_end)}")
        label.append("" if cause.task_id else ", said by a person or a program (trigger)")
    elif cause.taken_back is None:
        nothing_new = cause.upto is not None and cause.upto == cause.after
        label = Text(f"{dataset}: " + ("nothing new" if nothing_new else "its event wasn't found"), "dim")
    else:
        label.append(f" of {dataset}")
    if cause.upto is not None and cause.after is not None and cause.upto > cause.after:
        label.append(f"; read {cause.after + 1}-{cause.upto}", "dim")
    return label


def _taken_back(each: TakenBack) -> str:
    reason = f" ({cell(each.reason)})" if each.reason else ""
    return f"blocks {each.start}-{each.end} taken back{reason}"


def _print_range(found: RangeExplanation) -> None:
    name = f"{found.dag_name}/{found.job}" if found.job else found.dag_name
    print_fields(
        (
            ("dataset", found.dataset or found.dataset_uuid),
            ("producer", f"{name} ({found.operator})" if found.operator else name),
            (
                "reads",
                ", ".join(f"{each.dag_name}/{each.job}/{each.output_name}" for each in found.inputs) or None,
            ),
            ("storage", found.storage),
            ("blocks", scope(found.start, found.end) or "nothing is committed yet"),
        )
    )
    if found.pieces:
        print_heading("made by")
        print_table(
            (
                "BLOCKS",
                "TASK",
                "ATTEMPT",
                "WORKER",
                "COMMITTED",
                "TOOK",
                "WHAT",
                "VERIFIED",
                "ENDPOINTS",
                "REVISION",
            ),
            [_row(piece) for piece in found.pieces],
            indent=2,
        )
    _print_earlier(found)
    if found.next is not None:
        typer.echo(f"  there are more: --from {found.next}")
    if not found.searched:
        typer.echo("  older commits lie further back than the events that were looked through")
    if found.taken_back:
        print_heading("taken back")
        for each in found.taken_back:
            typer.echo(
                f"  {_moment(each.at)}  revision {each.revision}: {_taken_back(each)}, task {cell(each.task_id)}"
            )
    if found.gaps:
        print_heading("missing")
        for gap in found.gaps:
            typer.echo(f"  {gap.start}-{gap.end}  {counted(gap.blocks, 'block')}")
        if found.more_gaps:
            typer.echo("  and more: tracelake datasets gaps")


def _row(piece: RangePiece) -> tuple[object, ...]:
    took = (piece.committed_at - piece.claimed_at).total_seconds() if piece.claimed_at else None
    what = counted(piece.commits, "commit") if piece.commits is not None else None
    if piece.commits is None and piece.row_count is not None:
        what = counted(piece.row_count, "row")
        what += f" in {counted(piece.files, 'file')}" if piece.files is not None else ""
    return (
        f"{piece.start}-{piece.end}",
        piece.task_id or "triggered",
        piece.attempt,
        piece.worker_id,
        piece.committed_at,
        _duration(took) if took is not None and piece.commits is None else None,
        what,
        piece.verified,
        ", ".join(piece.endpoints) if piece.endpoints else None,
        piece.revision,
    )


def _print_earlier(found: RangeExplanation) -> None:
    rows = [(piece, each) for piece in found.pieces for each in piece.earlier_attempts]
    if rows:
        print_heading("attempts before these")
        print_table(
            ("TASK", "ATTEMPT", "WORKER", "OUTCOME", "ERROR"),
            [(p.task_id, each.attempt, each.worker_id, each.outcome, each.error_message) for p, each in rows],
            indent=2,
        )


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
