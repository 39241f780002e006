"""``tracelake logs``: prints the logs of the parts of a stack on this machine, and of the attempts of its tasks.

Workers write the log of an attempt to ``logs/tasks/TASK/ATTEMPT.log``. A log that is there is read from the file
alone, so that it can be read when no stack runs. The stack is asked only what files can't show: whether a task
without a log exists, and whether a task that is followed has ended.

``--follow`` shows a task's log as it grows, and then those of its next attempts, until the task has ended. The log
is read after the stack's answer, so that everything an attempt printed is shown before the command ends.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar
from uuid import UUID

import typer

from tracelake.cli.show import cell
from tracelake.cli.stack import DEFAULT_HOME, HIGHEST_ATTEMPT, MOST_LINES, JsonOption, connect
from tracelake.cli.tasks import MIN_PREFIX, may_be_task, recent_tasks, the_one, whole_id
from tracelake.domain.errors import NotFound, TracelakeError, Unavailable
from tracelake.domain.runtimes import DISPATCHER
from tracelake.objects import beneath

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.user_api import TaskDetail

_LINES = 50
_ASK = 1.0
_PATIENCE = 10
"""Failed requests in a row after which a stack that answered before is given up; it may be restarting."""
_OVER = ("Completed", "Failed", "Canceled")
QUIET = "NoOutput"
"""An attempt that printed nothing has no log; asking for it isn't an error."""
_LOG = re.compile(r"([1-9][0-9]{0,9})\.log")
T = TypeVar("T")
POLL = 0.2
"""Seconds between two looks at a log that is followed."""
_CHUNK = 1024 * 1024


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
            help="Number of last lines to begin with.  [default: 50, all of a task]",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print more as it is written, until Ctrl-C or the task's end."),
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, max=HIGHEST_ATTEMPT, help="Of a task: this attempt instead of the newest."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Of a task: every attempt.")] = False,
    home: Annotated[
        Path, typer.Option(readable=False, help="The home of a stack on this machine.")
    ] = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Print the end of a part's log, also of one that no longer runs, or the log of a task's attempts.

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
    # Without --follow, nothing would complete the last line.
    printed = tail.lines() if follow else chain(tail.lines(), tail.rest())
    for line in deque(printed, maxlen=lines):
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
    first = [entry.pop(name, None) for name in ("timestamp", "level", "event")]
    rest = [f"{name}={value}" for name, value in entry.items() if name != "logger"]
    typer.echo("  ".join(cell(each) for each in (*first, *rest) if each is not None))


def follow_task(
    logs: TaskLogs, attempt: int | None, lines: int | None, *, every: bool, as_json: bool
) -> None:
    """Start at ``attempt``, at the newest one, or with ``every`` at the first; show its last ``lines``, or all."""
    end = _End(logs, attempt)
    reading: tuple[int, Tail] | None = None
    while True:
        # Before the log is read: all that was printed until the end is still shown.
        over = end.reached()
        for each in _due(logs, attempt, reading[0] if reading else None, every):
            if reading is not None:
                logs.print_lines(reading[0], chain(reading[1].lines(), reading[1].rest()), as_json)
            if reading is not None or every:
                print_heading(each, as_json)
            reading = each, Tail(logs.path(each))
            logs.print_lines(each, last_lines(reading[1].lines(), lines), as_json)
        if reading is not None:
            logs.print_lines(reading[0], reading[1].lines(), as_json)
            # ``lines`` limits what was there at the start; everything after it is shown.
            lines = None
        if over:
            break
        time.sleep(POLL)
    if reading is None:
        logs.report_missing(attempt)
        return
    logs.print_lines(reading[0], reading[1].rest(), as_json)


def _due(logs: TaskLogs, attempt: int | None, shown: int | None, every: bool) -> list[int]:
    """The logs of the attempts to continue with."""
    known = logs.attempts()
    if attempt is not None:
        return [attempt] if attempt in known and shown is None else []
    if shown is None:
        return known if every else known[-1:]
    return [each for each in known if each > shown]


class _End:
    """Asks the stack now and then whether the task has ended."""

    def __init__(self, logs: TaskLogs, attempt: int | None) -> None:
        self._logs = logs
        self._attempt = attempt
        self._asked_at: float | None = None
        self._silent = 0
        self._last: TaskDetail | None = None

    def reached(self) -> bool:
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at < _ASK:
            return False
        self._asked_at = now
        try:
            answer = self._logs.ask()
        except NotFound:
            return True
        if answer is None:
            self._silent += 1
            # A stack that never answered isn't waited for; one that did may be restarting.
            return self._last is None or self._silent >= _PATIENCE
        if answer.attempt == 0 and self._last is None and answer.status not in _OVER:
            typer.echo(f"task {answer.task_id} hasn't been claimed yet; waiting", err=True)
        self._silent, self._last = 0, answer
        return self._ended(answer)

    def _ended(self, task: TaskDetail) -> bool:
        if self._attempt is not None and task.attempt >= self._attempt:
            return task.attempt > self._attempt or task.status != "Running"
        return task.status in _OVER


@dataclass(frozen=True, slots=True)
class TaskLogs:
    """The logs of one task."""

    home: Path
    task_id: UUID

    @classmethod
    def find(cls, home: Path, text: str) -> TaskLogs:
        """Find a task by its id or the beginning of it: one with logs here, or a recent one."""
        given = text.lower()
        if whole := whole_id(given):
            return cls(home, whole)
        names = (whole_id(entry.name) for entry in _folder(home).glob(f"{given}*"))
        found = [name for name in names if name] or _ask(home, lambda client: recent_tasks(client, given))
        if not found:
            raise NotFound("UnknownTask", f"{home} has no log of a part or a task that is called {text!r}")
        return cls(home, the_one(text, found))

    def path(self, attempt: int) -> Path:
        return _folder(self.home) / str(self.task_id) / f"{attempt}.log"

    def attempts(self) -> list[int]:
        """The attempts that have a log, in order."""
        names = (
            _LOG.fullmatch(entry.name) for entry in (_folder(self.home) / str(self.task_id)).glob("*.log")
        )
        return sorted(int(name[1]) for name in names if name)

    def show(self, attempts: Iterable[int] | None, lines: int | None, as_json: bool) -> None:
        """Print these attempts, or the newest; their last ``lines``, or all."""
        known = self.attempts()
        wanted = known[-1:] if attempts is None else list(attempts)
        absent = [each for each in wanted if each not in known]
        if absent or not wanted:
            self.report_missing(absent[0] if absent else None)
            return
        for attempt in wanted:
            if len(wanted) > 1:
                print_heading(attempt, as_json)
            tail = Tail(self.path(attempt))
            self.print_lines(attempt, last_lines(chain(tail.lines(), tail.rest()), lines), as_json)

    def report_missing(self, attempt: int | None) -> None:
        """Report an attempt that printed nothing; raise any other reason for a missing log."""
        why = self.missing(attempt)
        if why.reason != QUIET:
            raise why
        typer.echo(why.message, err=True)

    def missing(self, attempt: int | None) -> TracelakeError:
        """The reason why there is no log to show."""
        detail = self.ask()
        if detail is None:
            return NotFound(
                "NoTaskLog",
                f"{self.home} has no log of task {self.task_id}, and no stack runs there that would know more",
            )
        if detail.attempt == 0:
            return NotFound(
                "NotClaimed",
                f"task {self.task_id} hasn't been claimed yet: it is {detail.status}; "
                f"`tracelake task show {self.task_id}` says more",
            )
        if attempt is not None and attempt > detail.attempt:
            return NotFound("UnknownAttempt", f"task {self.task_id} has had {detail.attempt} attempts so far")
        if detail.runtime == DISPATCHER:
            return NotFound(
                "NoTaskLog", "the Dispatcher runs this task itself: see `tracelake logs dispatcher`"
            )
        return NotFound(
            QUIET,
            f"attempt {attempt or detail.attempt} of task {self.task_id} has no log in {self.home}: "
            "it printed nothing, the log was removed, or its worker runs on another machine",
        )

    def ask(self) -> TaskDetail | None:
        """The task as the stack knows it; None when no stack runs."""
        return _ask(self.home, lambda client: client.task(self.task_id))

    def print_lines(self, attempt: int, lines: Iterable[bytes], as_json: bool) -> None:
        for line in lines:
            text = line.decode("utf-8", "replace")
            if as_json:
                import msgspec

                typer.echo(msgspec.json.encode({"task_id": self.task_id, "attempt": attempt, "line": text}))
            else:
                typer.echo(cell(text.expandtabs()))


def _folder(home: Path) -> Path:
    return home / "logs" / "tasks"


def _ask(home: Path, question: Callable[[Client], T]) -> T | None:
    """None when no stack runs on the home. Reads the handle each time: a restarted stack has another address."""
    try:
        with connect(None, None, home) as client:
            return question(client)
    except Unavailable:
        return None


def last_lines(lines: Iterable[bytes], count: int | None) -> Iterable[bytes]:
    return lines if count is None else deque(lines, maxlen=count)


def print_heading(attempt: int, as_json: bool) -> None:
    if not as_json:
        typer.echo(f"==> attempt {attempt} <==")


class Tail:
    """Reads a growing log from its end on: whole lines, each once. A log that was truncated is read from its
    beginning; one that was removed has no lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._rest: list[bytes] = []

    def lines(self) -> Iterator[bytes]:
        """Lines that were added since the last call, without an unfinished one."""
        try:
            file = self._open()
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._place:
                self._place, self._rest = 0, []
            file.seek(self._place)
            while chunk := file.read(_CHUNK):
                self._place += len(chunk)
                head, *more = chunk.split(b"\n")
                # A line may be longer than a chunk: its parts are joined once, at its end.
                self._rest.append(head)
                if more:
                    yield b"".join(self._rest)
                    *whole, last = more
                    self._rest = [last]
                    yield from whole

    def _open(self) -> BinaryIO:
        """Open a plain file and no link: the reader may have more rights than a user who could put a link there."""
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.fdopen(beneath.open_file(folder, self._path.name), "rb")
        finally:
            os.close(folder)

    def rest(self) -> Iterator[bytes]:
        """The unfinished line, once no more is written."""
        rest, self._rest = b"".join(self._rest), []
        if rest:
            yield rest
