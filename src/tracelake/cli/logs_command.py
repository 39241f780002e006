"""``tracelake logs``: what the parts of a stack on this machine said, and what its tasks did."""

from __future__ import annotations

import time
from collections import deque
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from tracelake.cli.bounds import HIGHEST_ATTEMPT, MOST_LINES
from tracelake.cli.follow_task import follow_task
from tracelake.cli.show import cell
from tracelake.cli.stack import DEFAULT_HOME, JsonOption
from tracelake.cli.tail import POLL, Tail
from tracelake.cli.task_ids import MIN_PREFIX, may_be_task
from tracelake.cli.task_logs import TaskLogs
from tracelake.domain.errors import NotFound

_LINES = 50


def logs(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PART|TASK",
            help="dispatcher, query, sink, worker-RUNTIME, postgres-state, postgres-data, or a task's id or its "
            "beginning.",
        ),
    ] = "dispatcher",
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            max=MOST_LINES,
            help="Begin with so many last lines.  [default: 50, all of a task]",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as more is said, until Ctrl-C or the task's end.")
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, max=HIGHEST_ATTEMPT, help="Of a task: this attempt and not the newest."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Of a task: every attempt.")] = False,
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Print the end of a part's log, also of one that no longer runs, or what a task's attempts printed.

    Examples:

        tracelake logs

        tracelake logs dispatcher -f

        tracelake logs postgres-state -n 200 --json

        tracelake logs 0190b6c1 -f

        tracelake logs 0190b6c1-7e7a-7d3c-9c0e-5a3b0f6f2f11 --attempt 2
    """
    parts = _parts(home)
    if what not in parts and may_be_task(what):
        if every and attempt is not None:
            raise typer.BadParameter("--all and --attempt don't go together")
        _task_logs(TaskLogs.find(home, what), lines, follow, attempt, every, as_json)
        return
    if what not in parts:
        there = f"there are {', '.join(parts)}" if parts else "there are none yet"
        raise NotFound(
            "UnknownLog",
            f"{home} has no log of {what!r}: {there}, and those of tasks by {MIN_PREFIX} or more characters "
            "of their id",
        )
    if every or attempt is not None:
        raise typer.BadParameter("--attempt and --all are for tasks")
    _part_log(what, Tail(parts[what]), _LINES if lines is None else lines, follow, as_json)


def _task_logs(
    task: TaskLogs, lines: int | None, follow: bool, attempt: int | None, every: bool, as_json: bool
) -> None:
    if follow:
        follow_task(task, attempt, lines, every=every, as_json=as_json)
    elif every:
        task.show(task.attempts(), lines, as_json)
    else:
        task.show(None if attempt is None else [attempt], lines, as_json)


def _parts(home: Path) -> dict[str, Path]:
    files = {path.stem: path for path in sorted((home / "logs").glob("*.log"))}
    for cluster in ("state", "data"):
        path = home / "postgres" / cluster / "server.log"
        if path.exists():
            files[f"postgres-{cluster}"] = path
    return files


def _part_log(part: str, tail: Tail, lines: int, follow: bool, as_json: bool) -> None:
    said = tail.lines() if follow else chain(tail.lines(), tail.rest())
    for line in deque(said, maxlen=lines):
        _print(part, line, as_json)
    while follow:
        for line in tail.lines():
            _print(part, line, as_json)
        time.sleep(POLL)


def _print(part: str, line: bytes, as_json: bool) -> None:
    import msgspec

    try:
        entry = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        entry = {"event": line.decode("utf-8", "replace")}
    if as_json:
        typer.echo(msgspec.json.encode({"part": part, **entry}))
        return
    told = [entry.pop(name, None) for name in ("timestamp", "level", "event")]
    rest = [f"{name}={value}" for name, value in entry.items() if name != "logger"]
    typer.echo("  ".join(cell(each) for each in (*told, *rest) if each is not None))
