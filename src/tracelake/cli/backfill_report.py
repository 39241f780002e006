"""What a backfill shows of itself: a bar on a terminal, now and then a line elsewhere, JSON lines for programs."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from uuid import UUID

import typer

from tracelake.cli.show import cell, counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tracelake.contracts.coverage import BackfillFailure, BackfillState

_WINDOW = 60.0
_LINE_SECONDS = 5.0
_QUIET_SECONDS = 60.0


class Pace:
    """Blocks per second over the last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, committed: int) -> None:
        now = time.monotonic()
        self._seen.append((now, committed))
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


class Report(Protocol):
    """``show`` is called with every look at the state, ``fail`` once for each failed task."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, state: BackfillState, pace: Pace) -> None: ...

    def fail(self, failure: BackfillFailure) -> None: ...

    def say(self, text: str) -> None: ...


def a_report(*, as_json: bool) -> Report:
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
        self._said_at: float | None = None

    def show(self, state: BackfillState, pace: Pace) -> None:
        text = f"{_counts(state)}{_speed(state, pace)}"
        silent = _QUIET_SECONDS if self._said_at is None else time.monotonic() - self._said_at
        complete = state.committed_blocks == state.blocks
        if silent < _LINE_SECONDS and not complete:
            return
        if text != self._last or silent >= _QUIET_SECONDS:
            typer.echo(text)
            self._last, self._said_at = text, time.monotonic()

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


def print_failures(failed: list[BackfillFailure], seen: set[UUID], report: Report) -> None:
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


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {second} s" if minutes else f"{second} s"


def _print_line(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())
