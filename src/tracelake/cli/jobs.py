"""``tracelake trigger``, ``pause`` and ``resume``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.show import counted, print_json
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import Invalid

if TYPE_CHECKING:
    from tracelake.contracts.dispatcher_api import TriggerResponse


class WorkPriority(StrEnum):
    BULK = "bulk"
    NORMAL = "normal"


JobArgument = Annotated[str, typer.Argument(help="The job, as DAG/JOB.", metavar="DAG/JOB")]


def trigger(
    job: JobArgument,
    cursor: Annotated[
        int | None, typer.Option(min=0, max=MAX_BLOCK, help="Everything up to this block.")
    ] = None,
    start: Annotated[int | None, typer.Option(min=0, max=MAX_BLOCK, help="First block of a range.")] = None,
    end: Annotated[
        int | None, typer.Option(min=0, max=MAX_BLOCK, help="Last block of a range, inclusive.")
    ] = None,
    priority: Annotated[
        WorkPriority,
        typer.Option(case_sensitive=False, help="Bulk work waits behind normal work, and is held first."),
    ] = WorkPriority.NORMAL,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Trigger a manual source: blocks are there, up to a cursor or in a range. One that runs code needs no blocks.

    Examples:

        tracelake trigger chain/src --cursor 1000

        tracelake trigger chain/src --start 0 --end 999 --json

        tracelake trigger chain/src --start 0 --end 999 --priority bulk
    """
    dag, name = job_name(job)
    given = tuple(value is not None for value in (cursor, start, end))
    if given not in ((True, False, False), (False, True, True), (False, False, False)):
        raise typer.BadParameter("give either --cursor, or both --start and --end")
    if start is not None and end is not None and start > end:
        raise typer.BadParameter(f"--start {start} is above --end {end}")
    with connect(url, token, home) as client:
        try:
            done = client.trigger(dag, name, cursor=cursor, start=start, end=end, priority=priority.value)
        except Invalid as refused:
            if refused.reason != "InvalidEvent" or any(given):
                raise
            raise Invalid(
                refused.reason,
                f"{job} runs no code, so a trigger names blocks: --cursor, or --start and --end",
            ) from None
    if as_json:
        print_json(done)
    else:
        typer.echo(triggered(job, done))


def triggered(job: str, done: TriggerResponse) -> str:
    if done.kept:
        return f"kept until {job} may go on"
    event = "" if done.event_id is None else f"event {done.event_id}: "
    return f"{event}{counted(done.tasks_created, 'task')} created"


def pause(
    job: JobArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pause a job: no new tasks for it, none of its tasks claimed, until it is resumed.

    Examples:

        tracelake pause chain/first
    """
    _set_paused(job, True, url, token, home, as_json)


def resume(
    job: JobArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resume a paused job; it works off the events that arrived meanwhile.

    Examples:

        tracelake resume chain/first
    """
    _set_paused(job, False, url, token, home, as_json)


def _set_paused(
    job: str, paused: bool, url: str | None, token: str | None, home: Path | None, as_json: bool
) -> None:
    dag, name = job_name(job)
    with connect(url, token, home) as client:
        done = client.set_paused(dag, name, paused)
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{done.dag_name}/{done.job} is {'paused' if done.paused else 'running'}")


def job_name(text: str) -> tuple[str, str]:
    """Split ``DAG/JOB``."""
    dag, _, job = text.partition("/")
    if not dag or not job:
        raise typer.BadParameter(f"a job is written DAG/JOB, not {text!r}")
    return dag, job
