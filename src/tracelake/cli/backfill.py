"""``tracelake backfill``: runs a range of old blocks through a DAG and shows its progress.

One request to the stack returns both the state to show and the events still to be sent. The command decides by
these answers alone and remembers nothing: it may be interrupted at any time and resumed by running it again, and
two of them at once send no event twice.

Progress is a bar on a terminal, a line now and then elsewhere, and JSON lines for programs.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol, Self
from uuid import UUID

import typer

from tracelake.cli.failures import ExitCode
from tracelake.cli.jobs import JobArgument, WorkPriority, job_name
from tracelake.cli.show import cell, counted, duration, print_json
from tracelake.cli.stack import MAX_CHUNK, HomeOption, JsonOption, PatientClient, TokenOption, UrlOption
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import Conflict

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tracelake.client import Client
    from tracelake.contracts.coverage import BackfillFailure, BackfillHold, BackfillState, Gap, JobName
    from tracelake.contracts.user_api import TaskDetail, TaskPage

_POLL = 0.5
_STUCK_AFTER = 30.0
_STILL_AFTER = 5.0
# As shells report a program that SIGINT ended.
_INTERRUPTED = 130
_SPLIT_PATIENCE = 2.0
_SPLIT_POLL = 0.01
_WINDOW = 60.0
_LINE_SECONDS = 5.0
_QUIET_SECONDS = 60.0


class Order(StrEnum):
    OLDEST = "oldest"
    NEWEST = "newest"


def backfill(
    job: JobArgument,
    start: Annotated[
        int, typer.Option("--from", min=0, max=MAX_BLOCK, help="The first block.", show_default=False)
    ],
    end: Annotated[
        int, typer.Option("--to", min=0, max=MAX_BLOCK, help="The last block, inclusive.", show_default=False)
    ],
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_CHUNK,
            help="Blocks per task; must divide the splitter's chunk_size.  [default: that]",
        ),
    ] = None,
    order: Annotated[
        Order, typer.Option(case_sensitive=False, help="Which blocks come first.")
    ] = Order.OLDEST,
    priority: Annotated[
        WorkPriority,
        typer.Option(case_sensitive=False, help="Bulk work waits behind normal work, and is held first."),
    ] = WorkPriority.BULK,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Request the blocks and don't wait for them.")
    ] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fill in a range of blocks: request the missing ones, and show them arrive.

    The job is the one that stores the blocks, such as evm_ingest; upstream of it are a manual source and a
    range_splitter. Only blocks that are neither committed nor requested yet are requested, and tasks that failed
    earlier are retried, so the same command resumes an interrupted one. The job's scaling.max_concurrency limits
    how many tasks run at once. It is bulk work unless asked for as normal, so it never delays the tip of the chain:
    it waits while jobs downstream have too much to do, and the command says so.

    Ctrl-C ends the command and not the work. The exit code is 1 if tasks failed in the end.

    Examples:

        tracelake backfill chain/ingest --from 0 --to 999999 --dry-run

        tracelake backfill chain/ingest --from 0 --to 999999

        tracelake backfill chain/ingest --from 0 --to 999999 --order newest --no-wait
    """
    dag, name = job_name(job)
    if start > end:
        raise typer.BadParameter(f"--from {start} is behind --to {end}")
    with PatientClient(url, token, home) as client:
        work = Backfill(client, dag, name, start, end, chunk, order.value, priority.value)
        if dry_run:
            state = work.look()
            _print_plan(state, work.holds(state), as_json)
            return
        with a_report(as_json=as_json) as report:
            work.run(report, wait=not no_wait)


def _print_plan(state: BackfillState, holds: list[BackfillHold], as_json: bool) -> None:
    if as_json:
        print_json(state)
        return
    typer.echo(summary(state))
    through = f"{state.source.dag_name}/{state.source.job}"
    if state.splitter is not None:
        through += f" → {state.splitter.dag_name}/{state.splitter.job}"
    typer.echo(f"through {through}, at most {state.max_concurrency or 'any number'} at once")
    for each in state.runs_also:
        typer.echo(f"runs {each.dag_name}/{each.job} as well")
    for each in state.paused:
        typer.echo(f"waits: {each.dag_name}/{each.job} is paused")
    for hold in holds:
        typer.echo(f"waits: {hold.dag_name}/{hold.job} is held by {hold.cause}")
    for event in state.events[:10]:
        typer.echo(f"would ask for {event.start}-{event.end}")
    if len(state.events) > 10 or state.more_events:
        typer.echo("and so on")
    for failure in state.failed[:10]:
        typer.echo(f"would try again: {failure_line(failure)}")


@dataclass
class Backfill:
    client: PatientClient
    dag: str
    job: str
    start: int
    end: int
    chunk: int | None
    order: str
    priority: str = WorkPriority.BULK.value
    retried: set[UUID] = field(default_factory=set)
    reported: set[UUID] = field(default_factory=set)
    idle_since: float | None = None
    still_since: float | None = None
    waiting: str = ""
    hold_reported: bool = False
    reported_at: float | None = None

    def look(self) -> BackfillState:
        return self.client.ask(
            lambda client: client.backfill(
                self.dag, self.job, start=self.start, end=self.end, chunk=self.chunk, order=self.order
            )
        )

    def holds(self, state: BackfillState) -> list[BackfillHold]:
        """Those that stop work of this priority."""
        return [hold for hold in state.held if self.priority == WorkPriority.BULK or not hold.bulk_only]

    def run(self, report: BackfillReport, *, wait: bool) -> None:
        state = self.look()
        report.say(summary(state))
        try:
            state = self._retry(state)
            # What is asked for now is kept until the release; who waits may as well ask for it then.
            if not (wait and self.holds(state)):
                state = self._send_events(report, state)
            if not wait:
                report.say(f"requested; {counted(state.queued + state.running, 'task')} at work. {_resume()}")
                return
            self._watch(report, state)
        except KeyboardInterrupt:
            report.say(f"\nthe work goes on without this command. {_resume()}")
            raise typer.Exit(_INTERRUPTED) from None

    def _retry(self, state: BackfillState) -> BackfillState:
        """Retry each task that had failed before this command, once."""
        while due := [failure for failure in state.failed if failure.task_id not in self.retried]:
            for failure in due:
                # Noted before the call: a task that fails again isn't retried for ever.
                self.retried.add(failure.task_id)
                # Another command may have retried it in between.
                with suppress(Conflict):
                    self.client.ask(partial(_retry_task, failure.task_id))
            state = self.look()
        return state

    def _send_events(self, report: BackfillReport, state: BackfillState) -> BackfillState:
        """Send the missing events. Sending one twice is harmless: no second task comes of it."""
        while state.events:
            for event in state.events:
                self.client.ask(partial(_trigger, state.source, event, self.priority))
                if len(state.events) > 1 and state.splitter is not None:
                    self._until_split(state.splitter)
            state = self.look()
            self._say_held(report, state)
        return state

    def _until_split(self, splitter: JobName) -> None:
        """Wait for the splitter, since tasks run in the order in which they are made: the next range is sent when
        this one has been cut. A splitter that takes long, or is paused, costs the order and not the backfill."""
        give_up = time.monotonic() + _SPLIT_PATIENCE
        while time.monotonic() < give_up:
            page = self.client.ask(partial(_newest_task, splitter))
            if not page.tasks or page.tasks[0].status not in ("Queued", "Running"):
                return
            time.sleep(_SPLIT_POLL)

    def _watch(self, report: BackfillReport, state: BackfillState) -> None:
        pace = Pace()
        while True:
            pace.note(state.committed_blocks)
            report.show(state, pace)
            print_failures(state.failed, self.reported, report)
            if state.committed_blocks == state.blocks:
                report.say(f"all {counted(state.blocks, 'block')} are committed")
                return
            self._say_held(report, state)
            if state.events and not self.holds(state):
                state = self._send_events(report, state)
                continue
            self._check_alive(state)
            self._print_why_nothing_runs(report, state)
            began = time.monotonic()
            time.sleep(_POLL)
            state = self.look()
            # The longer the stack takes to answer, the less often it is asked.
            time.sleep(min(10.0, 4 * max(0.0, time.monotonic() - began - _POLL)))

    def _check_alive(self, state: BackfillState) -> None:
        """End the command when the missing blocks can no longer arrive."""
        if state.queued or state.running or state.paused or self.holds(state):
            self.idle_since = None
            return
        if state.failures:
            _give_up(f"{counted(state.failures, 'task')} failed; see `tracelake task show TASK`. {_resume()}")
        now = time.monotonic()
        self.idle_since = self.idle_since or now
        if now - self.idle_since > _STUCK_AFTER:
            missing = counted(state.blocks - state.committed_blocks, "block")
            _give_up(f"{missing} are missing, though nothing waits or runs: see `tracelake datasets gaps`")

    def _say_held(self, report: BackfillReport, state: BackfillState) -> None:
        """Report a hold when it begins: tasks that were made before it run on, so the command wouldn't stand still.
        Of a queue that is filled and emptied in turn, one hold a minute is reported."""
        holds = self.holds(state)
        if not holds:
            self.hold_reported = False
            return
        now = time.monotonic()
        if self.hold_reported or (self.reported_at is not None and now - self.reported_at < _QUIET_SECONDS):
            return
        self.hold_reported, self.reported_at = True, now
        # While the source itself is held nothing more is asked for.
        source = (state.source.dag_name, state.source.job)
        hold = next((each for each in holds if (each.dag_name, each.job) == source), holds[0])
        held = f"{hold.dag_name}/{hold.job}"
        report.say(
            f"waiting: {held} is held by {hold.cause}, and goes on by itself: `tracelake status` shows when"
        )

    def _print_why_nothing_runs(self, report: BackfillReport, state: BackfillState) -> None:
        """Report each reason why nothing runs once: a paused job, no worker, a reached concurrency limit. Holds are
        reported when they begin."""
        held = bool(self.holds(state)) and not state.paused
        if state.running or held or not (state.queued or state.paused):
            self.still_since = None
            return
        self.still_since = self.still_since or time.monotonic()
        if time.monotonic() - self.still_since < _STILL_AFTER:
            return
        if state.paused:
            paused = f"{state.paused[0].dag_name}/{state.paused[0].job}"
            why = f"{paused} is paused: `tracelake resume {paused}` lets it go on"
        else:
            why = self.client.ask(partial(_waiting_for, state))
        if why and why != self.waiting:
            report.say(f"waiting: {why}")
            self.waiting = why


def _retry_task(task: UUID, client: Client) -> None:
    client.retry(task)


def _trigger(source: JobName, event: Gap, priority: str, client: Client) -> None:
    client.trigger(source.dag_name, source.job, start=event.start, end=event.end, priority=priority)


def _newest_task(job: JobName, client: Client) -> TaskPage:
    return client.tasks(dag=job.dag_name, job=job.job, limit=1)


def _waiting_for(state: BackfillState, client: Client) -> str:
    """The reason why the oldest of the newest queued tasks doesn't run."""
    page = client.tasks(dag=state.job.dag_name, job=state.job.job, status="Queued", limit=1)
    if not page.tasks:
        return ""
    return why_waiting(client.task(page.tasks[-1].task_id))


def why_waiting(task: TaskDetail) -> str:
    """Includes the last error, since that is where a person can help."""
    if task.waiting_for is None:
        return ""
    before = f", after: {task.error_message}" if task.error_message else ""
    return f"{task.waiting_for.message}{before}"


def _give_up(why: str) -> NoReturn:
    typer.echo(f"error: {why}", err=True)
    raise typer.Exit(ExitCode.FAILED)


def _resume() -> str:
    return "The same command shows how far it is, and goes on with what is missing"


class Pace:
    """Blocks per second over the last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, committed: int) -> None:
        now = time.monotonic()
        self._seen.append((now, committed))
        # Two points stay, or a slow backfill would have no rate.
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - began) if now > began and last > first else 0.0

    def seconds_left(self, blocks: int) -> float | None:
        return blocks / self.rate if self.rate else None


class BackfillReport(Protocol):
    """``show`` is called with every look at the state, ``fail`` once for each failed task."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, state: BackfillState, pace: Pace) -> None: ...

    def fail(self, failure: BackfillFailure) -> None: ...

    def say(self, text: str) -> None: ...


def a_report(*, as_json: bool) -> BackfillReport:
    if as_json:
        return JsonLines()
    return Bar() if sys.stdout.isatty() else PlainLines()


class _Quiet:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class PlainLines(_Quiet):
    def __init__(self) -> None:
        self._last = ""
        self._printed_at: float | None = None

    def show(self, state: BackfillState, pace: Pace) -> None:
        text = f"{_counts(state)}{_speed(state, pace)}"
        silent = _QUIET_SECONDS if self._printed_at is None else time.monotonic() - self._printed_at
        complete = state.committed_blocks == state.blocks
        if silent < _LINE_SECONDS and not complete:
            return
        if text != self._last or silent >= _QUIET_SECONDS:
            typer.echo(text)
            self._last, self._printed_at = text, time.monotonic()

    def fail(self, failure: BackfillFailure) -> None:
        typer.echo(failure_line(failure), err=True)

    def say(self, text: str) -> None:
        typer.echo(text)


class JsonLines(_Quiet):
    """One object per line, whenever something has changed."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def show(self, state: BackfillState, pace: Pace) -> None:
        fields = {
            name: getattr(state, name)
            for name in (
                "blocks",
                "committed_blocks",
                "chunks",
                "committed_chunks",
                "queued",
                "running",
                "failures",
            )
        }
        if fields == self._last:
            return
        self._last = fields
        left = pace.seconds_left(state.blocks - state.committed_blocks)
        eta = None if left is None else round(left)
        _print_line(
            {"kind": "progress", **fields, "blocks_per_second": round(pace.rate, 1), "eta_seconds": eta}
        )

    def fail(self, failure: BackfillFailure) -> None:
        _print_line({"kind": "failed", "failure": failure})

    def say(self, text: str) -> None:
        # stdout has JSON lines alone.
        typer.echo(text, err=True)


class Bar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress: Progress = Progress(
            TextColumn("{task.fields[counts]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>5.1f} %{task.fields[speed]}"),
            console=Console(file=sys.stdout, highlight=False),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, value, trace)

    def show(self, state: BackfillState, pace: Pace) -> None:
        fields: dict[str, Any] = {"counts": _counts(state), "speed": _speed(state, pace)}
        if self._task is None:
            self._task = self._progress.add_task("", total=state.blocks, **fields)
        self._progress.update(self._task, completed=state.committed_blocks, **fields)

    def fail(self, failure: BackfillFailure) -> None:
        # Brackets in an error message aren't rich's markup.
        self._progress.console.print(failure_line(failure), style="red", markup=False)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False)


def summary(state: BackfillState) -> str:
    retried = f", {state.failures:,} failed to try again" if state.failures else ""
    return (
        f"{state.job.dag_name}/{state.job.job}: {counted(state.blocks, 'block')} in "
        f"{counted(state.chunks, 'chunk')} of {state.chunk:,}: {state.committed_chunks:,} committed, "
        f"{state.asked_chunks:,} asked for before, {state.unasked_chunks:,} to ask for{retried}"
    )


def failure_line(failure: BackfillFailure) -> str:
    why = cell(failure.error_message) if failure.error_message else failure.status
    return f"failed: {failure.dag_name}/{failure.job} {failure.start}-{failure.end}: {why} (task {failure.task_id})"


def print_failures(failed: list[BackfillFailure], seen: set[UUID], report: BackfillReport) -> None:
    for failure in failed:
        if failure.task_id not in seen:
            seen.add(failure.task_id)
            report.fail(failure)


def _counts(state: BackfillState) -> str:
    failed = f", {state.failures:,} failed" if state.failures else ""
    return (
        f"{state.committed_blocks:,} of {counted(state.blocks, 'block')}, "
        f"{state.running:,} running, {state.queued:,} waiting{failed}"
    )


def _speed(state: BackfillState, pace: Pace) -> str:
    left = pace.seconds_left(state.blocks - state.committed_blocks)
    if left is None:
        return ""
    return f", {pace.rate:,.0f} blocks/s" + (f", {duration(left)} left" if left else "")


def _print_line(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())
