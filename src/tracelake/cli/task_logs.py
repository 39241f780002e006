"""What the attempts of a task said, read where workers on this machine write it: ``logs/tasks/TASK/ATTEMPT.log``.

A log that is there is shown without asking anybody, so that it can be read when no stack runs. Only what the
files can't tell is asked of the stack: whether a task without a log exists, and whether one that is followed
has ended.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

import typer

from tracelake.cli.show import cell
from tracelake.cli.stack import connect
from tracelake.cli.tail import Tail
from tracelake.cli.task_ids import recent_tasks, the_one, whole_id
from tracelake.domain.errors import NotFound, TracelakeError, Unavailable

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.user_api import TaskDetail

QUIET = "NoOutput"
"""An attempt that printed nothing has no log; that is no failure of whoever asks for it."""
_LOG = re.compile(r"([1-9][0-9]{0,9})\.log")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskLogs:
    """The logs of one task."""

    home: Path
    task_id: UUID

    @classmethod
    def find(cls, home: Path, text: str) -> TaskLogs:
        """The task that an id, or the beginning of one, means: one with logs here, or a recent one."""
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
        """Those that have a log, in their order."""
        names = (
            _LOG.fullmatch(entry.name) for entry in (_folder(self.home) / str(self.task_id)).glob("*.log")
        )
        return sorted(int(name[1]) for name in names if name)

    def show(self, attempts: Iterable[int] | None, lines: int | None, as_json: bool) -> None:
        """These attempts, or the newest; with their last ``lines``, or whole."""
        known = self.attempts()
        wanted = known[-1:] if attempts is None else list(attempts)
        absent = [each for each in wanted if each not in known]
        if absent or not wanted:
            self.tell_missing(absent[0] if absent else None)
            return
        for attempt in wanted:
            if len(wanted) > 1:
                print_heading(attempt, as_json)
            tail = Tail(self.path(attempt))
            self.print_lines(attempt, last_lines(chain(tail.lines(), tail.rest()), lines), as_json)

    def tell_missing(self, attempt: int | None) -> None:
        """An attempt that printed nothing is worth a word; whatever else keeps its log away is a failure."""
        why = self.missing(attempt)
        if why.reason != QUIET:
            raise why
        typer.echo(why.message, err=True)

    def missing(self, attempt: int | None) -> TracelakeError:
        """Why there is no log to show."""
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
        if detail.runtime == "dispatcher":
            return NotFound(
                "NoTaskLog", "the Dispatcher runs this task itself: see `tracelake logs dispatcher`"
            )
        return NotFound(
            QUIET,
            f"attempt {attempt or detail.attempt} of task {self.task_id} has no log in {self.home}: "
            "it printed nothing, the log was removed, or its worker runs on another machine",
        )

    def ask(self) -> TaskDetail | None:
        """What the stack knows of the task; None when none runs."""
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
    """None when no stack runs on the home; by its handle each time, for a stack that was restarted moves."""
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
