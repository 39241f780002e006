"""``tracelake logs TASK --follow``: a task's log as it grows, on to its next attempts, until it has ended.

The stack is asked whether the task has ended, and the log is read after the answer: what an attempt said before
its end is shown before the command ends. Without a stack nobody can say more, so what is there is all there is.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING

import typer

from tracelake.cli.tail import POLL, Tail
from tracelake.cli.task_logs import TaskLogs, last_lines, print_heading
from tracelake.domain.errors import NotFound

if TYPE_CHECKING:
    from tracelake.contracts.user_api import TaskDetail

_ASK = 1.0
_PATIENCE = 10
"""So often in a row may a stack that has answered before fail to: it may be restarting."""
_OVER = ("Completed", "Failed", "Canceled")


def follow_task(
    logs: TaskLogs, attempt: int | None, lines: int | None, *, every: bool, as_json: bool
) -> None:
    """From ``attempt``, the newest, or with ``every`` the first; begin with the last ``lines``, or whole."""
    end = _End(logs, attempt)
    reading: tuple[int, Tail] | None = None
    while True:
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
            lines = None
        if over:
            break
        time.sleep(POLL)
    if reading is None:
        logs.tell_missing(attempt)
        return
    logs.print_lines(reading[0], reading[1].rest(), as_json)


def _due(logs: TaskLogs, attempt: int | None, shown: int | None, every: bool) -> list[int]:
    """The logs to go on to."""
    known = logs.attempts()
    if attempt is not None:
        return [attempt] if attempt in known and shown is None else []
    if shown is None:
        return known if every else known[-1:]
    return [each for each in known if each > shown]


class _End:
    """Asks now and then whether there is anything to wait for."""

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
            return self._last is None or self._silent >= _PATIENCE
        if answer.attempt == 0 and self._last is None and answer.status not in _OVER:
            typer.echo(f"task {answer.task_id} hasn't been claimed yet; waiting", err=True)
        self._silent, self._last = 0, answer
        return self._ended(answer)

    def _ended(self, task: TaskDetail) -> bool:
        if self._attempt is not None and task.attempt >= self._attempt:
            return task.attempt > self._attempt or task.status != "Running"
        return task.status in _OVER
