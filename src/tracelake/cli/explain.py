"""``tracelake explain``: a tree from a task back to its sources, or the tasks that wrote a range of blocks."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from tracelake.cli.datasets import resolve
from tracelake.cli.show import (
    cell,
    counted,
    duration,
    print_fields,
    print_heading,
    print_json,
    print_table,
    scope,
)
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.cli.tasks import find_task, may_be_task, requested, whole_id
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.text import Text
    from rich.tree import Tree

    from tracelake.client import Client
    from tracelake.contracts.explain import (
        Cause,
        ExplainedTask,
        RangeExplanation,
        RangeInvalidation,
        RangePiece,
        TaskExplanation,
        TaskStep,
    )

_WIDE = 1000
_COLOURS = {"Completed": "green", "Failed": "red", "Canceled": "yellow", "Running": "cyan"}
_BECAUSE = {
    "reconcile": "found missing by the reconciler",
    "invalidation": "to be made again after an invalidation",
    "deploy": "started by a deploy",
    "monitor": "started by the source monitor",
    "cron": "for a tick of its schedule",
    "webhook": "for a delivery to its webhook",
    "manual": "for a trigger by a person or a program",
}
_RANGED = re.compile(r"(?P<name>[^:]+):(?P<start>[0-9]{1,19})-(?P<end>[0-9]{1,19})")


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TASK|DATASET[:FROM-TO]",
            help="A task's id or its beginning; or a dataset, by its published name, uuid, or DAG/JOB[/OUTPUT].",
        ),
    ],
    start: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, max=MAX_BLOCK, help="A dataset's first block.  [default: the first committed]"
        ),
    ] = None,
    end: Annotated[
        int | None,
        typer.Option(
            "--to", min=0, max=MAX_BLOCK, help="Its last block, inclusive.  [default: the last committed]"
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=50, help="Maximum number of tasks to go back.")] = 20,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of pieces of a dataset.")] = 100,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain where a task or a range of blocks comes from.

    Of a task: the event that caused it, the attempt that sent it, the cause of that, and so on back to the source,
    with the time of each step and how long it took since the one before.

    Of a dataset's blocks: the tasks and attempts that wrote them, the endpoints that delivered them, what was
    verified, the invalidated ranges, and the missing ones.

    Examples:

        tracelake explain 0190b6c1

        tracelake explain blocks --from 1000 --to 1999

        tracelake explain chain/ingest/logs:1000-1999 --json
    """
    if (ranged := _RANGED.fullmatch(what)) is not None:
        if start is not None or end is not None:
            raise typer.BadParameter("give the blocks as DATASET:FROM-TO or by --from and --to, not both")
        what, start, end = ranged["name"], int(ranged["start"]), int(ranged["end"])
    with connect(url, token, home) as client:
        found = _look(client, what, start, end, depth, limit)
    if as_json:
        print_json(found)
    else:
        print_explanation(found)


def _look(
    client: Client, what: str, start: int | None, end: int | None, depth: int, limit: int
) -> TaskExplanation | RangeExplanation:
    """A uuid names a task or a dataset; with blocks it names a dataset. If the beginning of a task's id is also the
    name of a dataset, the dataset is shown."""
    of_task = start is None and end is None
    if of_task and (task_id := whole_id(what)) is not None:
        try:
            return client.explain_task(task_id, depth=depth)
        except NotFound as unknown:
            try:
                return client.explain_range(what, limit=limit)
            except NotFound:
                raise NotFound("UnknownTask", f"there is no task and no dataset {what}") from unknown
    try:
        return client.explain_range(resolve(client, what), start=start, end=end, limit=limit)
    except NotFound as unknown:
        if not of_task:
            raise
        if not may_be_task(what):
            raise NotFound(
                unknown.reason, f"{unknown.message}; ids of tasks are in `tracelake tasks`"
            ) from None
    return client.explain_task(find_task(client, what), depth=depth)


def print_explanation(found: TaskExplanation | RangeExplanation) -> None:
    from tracelake.contracts.explain import TaskExplanation

    if isinstance(found, TaskExplanation):
        _print_task(found)
    else:
        _print_range(found)


def _print_task(found: TaskExplanation) -> None:
    from rich.console import Console
    from rich.tree import Tree

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
        typer.echo(f"{duration(found.seconds, 3)} from the first event to the last step")
    if found.unexplored:
        tasks_left = counted(len(found.unexplored), "task")
        typer.echo(f"{tasks_left} further back left out: tracelake explain {found.unexplored[0]}")


def _grow(branch: Tree, task: ExplainedTask, tasks: Mapping[UUID, ExplainedTask], shown: set[UUID]) -> None:
    from rich.text import Text

    for cause in task.causes:
        twig = branch.add(_cause_label(cause))
        behind = tasks.get(cause.task_id) if cause.task_id is not None else None
        if behind is None:
            continue
        if behind.task_id in shown:
            twig.add(Text(f"{behind.dag_name}/{behind.job}, task {behind.task_id}: shown above", "dim"))
            continue
        shown.add(behind.task_id)
        _grow(twig.add(_task_label(behind)), behind, tasks, shown)


def _task_label(task: ExplainedTask) -> Text:
    from rich.text import Text

    label = Text()
    label.append(f"{task.dag_name}/{task.job}", "bold")
    if (span := scope(task.start, task.end)) is not None:
        label.append(f" {span}")
    label.append("  ")
    label.append(task.status, _COLOURS.get(task.status, ""))
    label.append(f"  {task.operator} on {task.runtime}, task {task.task_id}", "dim")
    if task.because in _BECAUSE:
        label.append(f"\n{_BECAUSE[task.because]}", "dim")
        label.append(f": {requested(task.requested)}" if task.requested else "", "dim")
    if task.taken_back is not None:
        label.append(f"\n{_invalidation_text(task.taken_back)}", "yellow")
    for each in task.handovers:
        label.append("\n")
        label.append(_step_line(each))
    if task.error_message:
        label.append(f"\n{cell(task.error_message)}", "red")
    return label


def _step_line(each: TaskStep) -> Text:
    from rich.text import Text

    waited = f"+{duration(each.seconds, 3)}" if each.seconds is not None else ""
    return Text(f"{_moment(each.at)}  {waited:>10}  {cell(each.what)}")


def _cause_label(cause: Cause) -> Text:
    from rich.text import Text

    name = f"{cause.dag_name}/{cause.job}" if cause.job else cause.dag_name
    dataset = f"{name}/{cause.output_name}" + (f" ({cause.dataset})" if cause.dataset else "")
    label = Text("because of ")
    if cause.taken_back is not None:
        label.append(_invalidation_text(cause.taken_back), "yellow")
    if cause.event_id is not None:
        start = cause.event_start if cause.event_kind == "partition" else None
        label.append(" and " if cause.taken_back else "")
        label.append(f"event {cause.event_id}: {dataset} {scope(start, cause.event_end)}")
        label.append("" if cause.task_id else ", sent by a person or a program (trigger)")
    elif cause.taken_back is None:
        nothing_new = cause.upto is not None and cause.upto == cause.after
        label = Text(f"{dataset}: " + ("nothing new" if nothing_new else "its event wasn't found"), "dim")
    else:
        label.append(f" of {dataset}")
    if cause.upto is not None and cause.after is not None and cause.upto > cause.after:
        label.append(f"; read {cause.after + 1}-{cause.upto}", "dim")
    return label


def _invalidation_text(each: RangeInvalidation) -> str:
    reason = f" ({cell(each.reason)})" if each.reason else ""
    return f"blocks {each.start}-{each.end} invalidated{reason}"


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
        print_heading("invalidated")
        for each in found.taken_back:
            text = f"revision {each.revision}: {_invalidation_text(each)}, task {cell(each.task_id)}"
            typer.echo(f"  {_moment(each.at)}  {text}")
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
        duration(took, 3) if took is not None and piece.commits is None else None,
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
