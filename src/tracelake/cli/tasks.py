"""``tracelake tasks``, ``task show``, ``cancel`` and ``retry``.

A task is named by its id, or by the beginning of it if that is unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from tracelake.cli.show import cell, pairs, print_fields, print_heading, print_json, print_table, scope
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.errors import Invalid, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracelake.client import Client
    from tracelake.contracts.user_api import TaskDetail, TaskSummary

_MOST_STATE = 500
_SHOWN = 10
"""Attempts and events, newest first: a follower sends an event per block."""
MIN_PREFIX = 6
_NEWEST = 1000
_ID = re.compile(rf"[0-9a-fA-F-]{{{MIN_PREFIX},36}}")
_WHERE = "ids are in `tracelake tasks`"


task_app = typer.Typer(help="Look at one task.", no_args_is_help=True)


class Status(StrEnum):
    QUEUED = "Queued"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELED = "Canceled"


def tasks(
    dag: Annotated[str | None, typer.Option(help="Only of this DAG.")] = None,
    job: Annotated[str | None, typer.Option(help="Only of jobs of this name.")] = None,
    status: Annotated[Status | None, typer.Option(case_sensitive=False, help="Only in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of tasks.")] = 20,
    after: Annotated[str | None, typer.Option(help="Go on after a page's `next`.")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks, newest first.

    Examples:

        tracelake tasks

        tracelake tasks --status failed --limit 100

        tracelake tasks --dag chain --job first --json
    """
    with connect(url, token, home) as client:
        page = client.tasks(
            dag=dag, job=job, status=status.value if status else None, limit=limit, after=after
        )
    if as_json:
        print_json(page)
        return
    if not page.tasks:
        typer.echo("no tasks")
        return
    _print_list(page.tasks)
    if page.next is not None:
        typer.echo(f"more: --after {page.next}", err=True)


def _print_list(tasks: Sequence[TaskSummary]) -> None:
    """Print a row per task, with columns for progress and for reasons to wait if any task has one."""
    progress = [pairs(each.progress) if each.status == "Running" else None for each in tasks]
    reported = any(progress)
    waits = [each.waiting_for.message if each.waiting_for else None for each in tasks]
    waiting = any(waits)
    heading = (*(("PROGRESS",) if reported else ()), *(("WAITS FOR",) if waiting else ()))
    print_table(
        ("TASK", "JOB", "SCOPE", "STATUS", "ATTEMPT", *heading, "CREATED", "WORKER", "ERROR"),
        [
            (
                each.task_id,
                f"{each.dag_name}/{each.job}",
                scope(each.start, each.end),
                each.status,
                each.attempt,
                *((how_far,) if reported else ()),
                *((why,) if waiting else ()),
                each.created_at,
                each.worker_id,
                each.error_message,
            )
            for each, how_far, why in zip(tasks, progress, waits, strict=True)
        ],
    )


@task_app.command("show")
def show_task(
    task: TaskArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a task with its attempts, inputs, outputs and events, and the reason if it waits.

    Examples:

        tracelake task show 0190b6c1

        tracelake task show 0190b6c1-7e7a-7d3c-9c0e-5a3b0f6f2f11 --json
    """
    with connect(url, token, home) as client:
        detail = client.task(find_task(client, task))
    if as_json:
        print_json(detail)
    else:
        _print_detail(detail)


def _print_detail(task: TaskDetail) -> None:
    waiting = task.waiting_for
    print_fields(
        (
            ("task", task.task_id),
            ("job", f"{task.dag_name}/{task.job}"),
            ("operator", f"{task.operator} on {task.runtime}"),
            ("scope", scope(task.start, task.end)),
            ("for", requested(task.cause) if task.kind == "request" else None),
            ("status", task.status),
            ("waits for", waiting.message if waiting else None),
            ("waits until", waiting.until if waiting else None),
            ("waits since", waiting.since if waiting else None),
            ("attempt", task.attempt),
            ("failures", task.failures or None),
            ("progress", pairs(task.progress)),
            ("worker", task.worker_id),
            ("created", task.created_at),
            ("lease until", task.lease_expires_at),
            ("ended", task.ended_at),
            ("error", task.error_message),
            ("saved state", _shortened(task.state)),
        )
    )
    _print_attempts(task)
    _print_data(task)
    _print_events(task)


def requested(cause: Any) -> str:
    """The tick, the delivery or the trigger that a source's task is for."""
    kind, number = cause["kind"], cause["number"]
    if kind == "cron":
        return f"tick {number}, {cell(datetime.fromtimestamp(number, UTC))}"
    if kind == "webhook":
        return f"delivery {number}"
    named = {name: cause[name] for name in ("cursor", "start", "end") if name in cause}
    return ", ".join([f"trigger {number}", *(f"{name} {value}" for name, value in named.items())])


def _shortened(state: object) -> str | None:
    """The beginning of a saved state; ``--json`` prints all of it."""
    import msgspec

    if state is None:
        return None
    text = msgspec.json.encode(state).decode()
    return text if len(text) <= _MOST_STATE else f"{text[:_MOST_STATE]}… ({len(text):,} bytes)"


def _print_attempts(task: TaskDetail) -> None:
    if task.attempts:
        print_heading("attempts")
        print_table(
            ("ATTEMPT", "WORKER", "CLAIMED", "ENDED", "OUTCOME", "ERROR"),
            [
                (
                    each.attempt,
                    each.worker_id,
                    each.claimed_at,
                    each.ended_at,
                    each.outcome,
                    each.error_message,
                )
                for each in task.attempts[:_SHOWN]
            ],
            indent=2,
        )
        _print_rest(len(task.attempts))


def _print_events(task: TaskDetail) -> None:
    if task.events:
        print_heading("events")
        print_table(
            ("EVENT", "KIND", "SCOPE", "REVISION", "STATE", "AT"),
            [
                (e.event_id, e.kind, scope(e.start, e.end), e.revision, e.state, e.created_at)
                for e in task.events[:_SHOWN]
            ],
            indent=2,
        )
        _print_rest(len(task.events))


def _print_rest(count: int) -> None:
    if count > _SHOWN:
        typer.echo(f"  and {count - _SHOWN} more: --json")


def _print_data(task: TaskDetail) -> None:
    if task.inputs:
        print_heading("inputs")
        print_table(
            ("INPUT", "DATASET", "STORAGE", "REVISION", "SCOPE", "TRIGGERS", "WHERE"),
            [
                (
                    each.input_index,
                    each.dataset or each.dataset_uuid,
                    each.storage,
                    each.revision,
                    scope(each.start, each.end) or scope(each.after, each.upto),
                    each.trigger,
                    each.where,
                )
                for each in task.inputs
            ],
            indent=2,
        )
    if task.outputs:
        print_heading("outputs")
        rows = [(output, part) for output in task.outputs for part in output.partitions or (None,)]
        print_table(
            ("OUTPUT", "NAME", "DATASET", "STORAGE", "COMMITTED", "ROWS", "CURRENT"),
            [
                (
                    output.output_index,
                    output.name,
                    output.dataset or output.dataset_uuid,
                    output.storage,
                    part.partition_key if part else None,
                    part.row_count if part else None,
                    part.current if part else None,
                )
                for output, part in rows
            ],
            indent=2,
        )


def cancel(
    task: TaskArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a task at once; a running attempt is notified by its next heartbeat.

    Examples:

        tracelake cancel 0190b6c1-7e7a-7d3c-9c0e-5a3b0f6f2f11
    """
    with connect(url, token, home) as client:
        changed = client.cancel(find_task(client, task))
    if as_json:
        print_json(changed)
    else:
        typer.echo(f"task {changed.task_id} is {changed.status}")


def retry(
    task: TaskArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Queue a failed task again at once, also when it has no attempts left.

    Examples:

        tracelake retry 0190b6c1-7e7a-7d3c-9c0e-5a3b0f6f2f11
    """
    with connect(url, token, home) as client:
        changed = client.retry(find_task(client, task))
    if as_json:
        print_json(changed)
    else:
        typer.echo(f"task {changed.task_id} is {changed.status}")


def may_be_task(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def whole_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _checked(text: str) -> str:
    if whole_id(text) is None and not may_be_task(text):
        raise typer.BadParameter(
            f"{text!r} isn't a task's id, nor {MIN_PREFIX} or more characters of its beginning: {_WHERE}"
        )
    return text


TaskArgument = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        callback=_checked,
        help=f"The task's id, or its first characters, {MIN_PREFIX} at least.",
    ),
]


def find_task(client: Client, text: str) -> UUID:
    """Find a task by its id, or a recent one by the beginning of its id."""
    if (whole := whole_id(text)) is not None:
        return whole
    found = recent_tasks(client, text)
    if not found:
        raise NotFound(
            "UnknownTask",
            f"none of the newest {_NEWEST:,} tasks has an id that begins with {text!r}: {_WHERE}",
        )
    return the_one(text, found)


def recent_tasks(client: Client, beginning: str) -> list[UUID]:
    given = beginning.lower()
    tasks = client.tasks(limit=_NEWEST).tasks
    return [each.task_id for each in tasks if str(each.task_id).startswith(given)]


def the_one(text: str, found: Sequence[UUID]) -> UUID:
    """The only task found; raises when the beginning of an id matches several."""
    if len(found) > 1:
        some = ", ".join(sorted(map(str, found))[:5])
        raise Invalid("AmbiguousTask", f"{text!r} may be any of {len(found)} tasks: {some}")
    return found[0]
