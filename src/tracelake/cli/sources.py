"""``tracelake sources``: lists sources and their schedules, runs one now, and shows a webhook's secret."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tracelake.cli.jobs import JobArgument, job_name
from tracelake.cli.show import cell, counted, print_fields, print_heading, print_json, print_table
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.errors import Conflict, NotFound

if TYPE_CHECKING:
    from tracelake.contracts.sources import SourcePage, SourceSummary

sources_app = typer.Typer(help="Sources: schedules, webhooks, what they have accepted.", no_args_is_help=True)


@sources_app.command("list")
def list_sources(
    url: UrlOption = None, token: TokenOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """List sources: how each is activated, its last and next tick, and how many requests wait while it is held.

    Examples:

        tracelake sources list

        tracelake sources list --json
    """
    with connect(url, token, home) as client:
        page = client.sources()
    listed = [Listed(each, *_upcoming(each, page.now)) for each in page.sources]
    if as_json:
        print_json({"now": page.now, "sources": [_with_next(each) for each in listed]})
        return
    if not page.sources:
        typer.echo("no sources")
        return
    print_table(
        ("SOURCE", "KIND", "RUNS", "ACTIVATED BY", "LAST", "NEXT", "WAITING", "STATE"),
        [
            (
                f"{each.dag_name}/{each.job}",
                each.kind,
                each.operator if each.runs_code or each.kind == "always_on" else "-",
                _activated_by(each),
                _last(each),
                upcoming,
                each.waiting or None,
                problem or _state(each, page.now),
            )
            for each, upcoming, problem in listed
        ],
    )


class Listed(NamedTuple):
    """``problem``: why this machine can't evaluate its schedule; a scheduler probably can't either."""

    source: SourceSummary
    next: datetime | None
    problem: str | None


def _with_next(listed: Listed) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(listed.source)
    return {**fields, "next": listed.next, "problem": listed.problem}


def _upcoming(source: SourceSummary, now: datetime) -> tuple[datetime | None, str | None]:
    """Its next tick, or what is wrong with its schedule: one that can't be used doesn't keep others from a list."""
    try:
        return next(iter(_next(source, now, 1)), None), None
    except Exception as error:
        return None, f"makes no ticks: {error}"


def without_ticks(page: SourcePage) -> dict[str, str]:
    """Cron sources whose schedules can't be used, each with why."""
    problems = {f"{each.dag_name}/{each.job}": _upcoming(each, page.now)[1] for each in page.sources}
    return {name: problem for name, problem in problems.items() if problem is not None}


def print_without_ticks(page: SourcePage) -> None:
    found = without_ticks(page)
    if not found:
        return
    print_heading("sources without ticks")
    for name, problem in found.items():
        typer.echo(f"  {name} {cell(problem)}")
    typer.echo("  next: correct the schedule, and tracelake deploy FILE")


def _activated_by(source: SourceSummary) -> str | None:
    if source.schedule is not None:
        return f"{source.schedule} {source.timezone}, catch up {source.catch_up}"
    if source.signature is not None:
        return f"{hook_path(source.dag_name, source.job)}, {source.signature}"
    return None


def hook_path(dag: str, job: str) -> str:
    return f"/v1/hooks/{dag}/{job}"


def _last(source: SourceSummary) -> object:
    if source.last_tick is not None:
        return datetime.fromtimestamp(source.last_tick, UTC)
    return None if source.last_number is None else f"{source.last_number}, {cell(source.last_at)}"


def _state(source: SourceSummary, now: datetime) -> str:
    if source.paused:
        return f"paused ({', '.join(source.pause_causes) or 'person'})"
    if source.last_tick is not None and source.last_tick > now.timestamp() + 1:
        return "its last tick is in the future: the clock was set back"
    if source.schedule is not None and source.since is not None and source.since > now + timedelta(seconds=1):
        return "the deploy of its schedule is in the future: the clock was set back"
    return cell(source.waiting_for)


def _next(source: SourceSummary, now: datetime, count: int) -> list[datetime]:
    if source.schedule is None or source.timezone is None:
        return []
    from tracelake.domain.schedule import next_ticks, parse_schedule

    after = max(now, datetime.fromtimestamp(source.last_tick or 0, UTC), source.since or now)
    return next_ticks(parse_schedule(source.schedule, source.timezone), after, count)


@sources_app.command("next")
def next_times(
    job: JobArgument,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Number of ticks.")] = 5,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the next ticks of a cron source, in its own time zone and, if that is another one, in UTC.

    Examples:

        tracelake sources next reports/nightly

        tracelake sources next reports/nightly --count 20 --json
    """
    from zoneinfo import ZoneInfo

    dag, name = job_name(job)
    with connect(url, token, home) as client:
        page = client.sources()
    found = next((each for each in page.sources if (each.dag_name, each.job) == (dag, name)), None)
    if found is None:
        raise NotFound("UnknownSource", f"there is no source {job}")
    if found.timezone is None:
        raise Conflict("NotCron", f"{job} is not a cron source")
    ticks = _next(found, page.now, count)
    if as_json:
        print_json(
            {
                "dag_name": dag,
                "job": name,
                "schedule": found.schedule,
                "timezone": found.timezone,
                "ticks": [{"tick": int(tick.timestamp()), "at": tick} for tick in ticks],
            }
        )
        return
    zone = ZoneInfo(found.timezone)
    columns: list[tuple[str, Callable[[datetime], object]]] = [
        (found.timezone, lambda tick: tick.astimezone(zone).strftime("%a %Y-%m-%d %H:%M:%S %z")),
        ("UTC", lambda tick: tick),
        ("TICK", lambda tick: int(tick.timestamp())),
    ]
    if found.timezone == "UTC":
        del columns[1]
    print_table([name for name, _ in columns], [[shown(tick) for _, shown in columns] for tick in ticks])


@sources_app.command()
def run(
    job: JobArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a tick of a cron source now. Its schedule goes on as before.

    Examples:

        tracelake sources run reports/nightly
    """
    dag, name = job_name(job)
    with connect(url, token, home) as client:
        done = client.run_source(dag, name)
        page = client.sources() if done.kept and not as_json else None
    if as_json:
        print_json(done)
    elif page is not None:
        typer.echo(f"tick {done.tick} is kept: {job} {_kept_by(page, dag, name)}")
    else:
        typer.echo(f"tick {done.tick}: {counted(done.tasks_created, 'task')} created")


def _kept_by(page: SourcePage, dag: str, name: str) -> str:
    """What a tick that was kept just now waits for."""
    found = next((each for each in page.sources if (each.dag_name, each.job) == (dag, name)), None)
    if found is not None and found.paused:
        held = [cause for cause in found.pause_causes if cause.startswith("backpressure ")]
        states = [] if len(held) == len(found.pause_causes) > 0 else ["is paused"]
        return " and ".join([*states, *(f"is held by {cause}" for cause in held)])
    if found is not None and found.waiting_for is not None:
        return f"has no room: {found.waiting_for}"
    return "has earlier ones to route first"


@sources_app.command()
def secret(
    job: JobArgument,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make a new one; those before it are accepted a while longer.")
    ] = False,
    overlap_seconds: Annotated[
        int,
        typer.Option(
            min=0,
            max=30 * 24 * 3600,
            help="With --rotate: how long those before it are accepted at most; 0 ends all of them at once.",
        ),
    ] = 24 * 3600,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the secret of a webhook, once: its callers sign with it. It can't be shown again, only rotated.

    A rotation keeps no earlier secret for longer than it had: after a leak, --overlap-seconds 0 ends all of them. A
    webhook has three secrets at most; a rotation that would need a fourth is refused.

    Examples:

        tracelake sources secret payments/calls

        tracelake sources secret payments/calls --rotate --overlap-seconds 3600

        tracelake sources secret payments/calls --rotate --overlap-seconds 0
    """
    dag, name = job_name(job)
    with connect(url, token, home) as client:
        found = client.webhook_secret(dag, name, rotate=rotate, overlap_seconds=overlap_seconds)
    if as_json:
        print_json(found)
        return
    print_fields(
        (
            ("path", found.path),
            ("signature", found.signature),
            ("secret", found.secret),
            ("the one before", found.previous_until and f"accepted until {cell(found.previous_until)}"),
        )
    )
