"""The environment, folder, log and wrapper connection of one attempt in an operator process.

``AttemptSetup`` restores everything afterwards, standard output and error first: once they point to /dev/null, the
wrapper sees the end of the attempt's log. Things that an attempt has left unchanged (an empty folder, open
streams, the log handler) serve the next one too: making them anew costs more than a short attempt.

``Context`` sends and receives messages through ``AttemptLink``. The reader thread adds messages that arrive, the
operator's threads wait for them. An attempt that is over sends nothing more, so a thread that an operator left
behind can't act for the next attempt.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from tracelake.contracts.operator_protocol import (
    Action,
    Call,
    CallProblem,
    FromOperator,
    Progress,
    Reply,
    Run,
)
from tracelake.domain import errors
from tracelake.domain.errors import Conflict, Invalid, TracelakeError
from tracelake.trees import remove_if_possible

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tracelake.worker.spark.session import SparkAttempt

PATH = "/usr/local/bin:/usr/bin:/bin"
_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
CAPABILITY_VARIABLE = "TRACE_TASK_CAPABILITY_TOKEN"
_call_ids = itertools.count(1)


class AttemptSetup:
    """The stage of one process, for one attempt after another."""

    def __init__(self, work_folder: Path) -> None:
        self._work_folder = str(work_folder)
        self._before = os.getcwd()
        self._folder: str | None = None
        self._made: os.stat_result | None = None
        self._streams: tuple[TextIO, TextIO] | None = None
        self._handler: logging.StreamHandler[TextIO] | None = None

    @contextmanager
    def attempt(self, environment: Mapping[str, str], log: int) -> Iterator[None]:
        """Set up an attempt. ``log`` is closed here. Raises ``OSError`` when there is no room for a folder."""
        try:
            self._lead_to(log)
            folder = self._make_folder()
            _set_environment({**environment, **_minimal(folder)})
            os.chdir(folder)
            yield
        finally:
            _set_environment(_minimal(self._work_folder))
            os.chdir(self._before)
            self._flush()
            lead_nowhere()
            # Flush unread output so that it can't leak into the next attempt's log.
            self._flush()
            os.umask(0o022)
            self._clear_folder()

    def close(self) -> None:
        if self._folder is not None:
            remove_if_possible(self._folder)
            self._folder = None

    def _make_folder(self) -> str:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="attempt-", dir=self._work_folder)
            self._made = os.stat(self._folder)
        return self._folder

    def _clear_folder(self) -> None:
        """Keep the folder only if it is the same one, with the same owner and mode, and empty."""
        if self._folder is None or self._made is None:
            return
        try:
            now = os.lstat(self._folder)
            untouched = _identity(now) == _identity(self._made) and not os.listdir(self._folder)
        except OSError:
            untouched = False
        if not untouched:
            self.close()

    def _lead_to(self, log: int) -> None:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if self._streams is None or not all(map(_is_as_made, self._streams)):
            self._streams = _stream(1), _stream(2)
        sys.stdout, sys.stderr = self._streams
        self._handle_messages(sys.stderr)

    def _flush(self) -> None:
        """The operator may have replaced the streams."""
        for stream in (*(self._streams or ()), sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()

    def _handle_messages(self, stream: TextIO) -> None:
        """Restore the handler of ``logging``, whatever an earlier attempt changed."""
        root, handler = logging.root, self._handler
        if handler is None or handler.stream is not stream or not _passes_all(handler):
            handler = logging.StreamHandler(stream)
            handler.setFormatter(_FORMAT)
            self._handler = handler
        if root.handlers != [handler]:
            logging.basicConfig(handlers=[handler], force=True)
        if root.level != logging.INFO:
            root.setLevel(logging.INFO)


def lead_nowhere() -> None:
    """Redirect standard input, output and error to ``/dev/null``; ``print`` then costs nothing and reaches no
    log."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if null > 2:
        os.close(null)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def _stream(descriptor: int) -> TextIO:
    """Line-buffered, so that a log can be followed, and without errors for any character."""
    return os.fdopen(descriptor, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _is_as_made(stream: TextIO) -> bool:
    try:
        settings = (stream.closed, stream.encoding, stream.errors, stream.line_buffering)
    except ValueError:
        # Detached from its descriptor.
        return False
    return settings == (False, "utf-8", "backslashreplace", True)


def _passes_all(handler: logging.Handler) -> bool:
    return handler.formatter is _FORMAT and handler.level == logging.NOTSET and not handler.filters


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    # Otherwise the first attempt's value is cached for all that follow.
    tempfile.tempdir = None


def _minimal(folder: str) -> dict[str, str]:
    return {"PATH": PATH, "HOME": folder, "LANG": "C.UTF-8", "TMPDIR": folder}


class AttemptLink:
    def __init__(self, run: Run, send: Callable[[FromOperator], None]) -> None:
        self._run = run
        self._send = send
        self._changed = threading.Condition()
        self._awaited: dict[int, Reply | None] = {}
        self._canceled = False
        self._paused = False
        self._over = False
        self._spark: SparkAttempt | None = None
        self._opening_spark = threading.Lock()
        self.on_spark_progress: Callable[[dict[str, Any]], None] | None = None

    @property
    def canceled(self) -> bool:
        return self._canceled

    @property
    def paused(self) -> bool:
        return self._paused

    def call(self, action: Action) -> Any:
        call_id = next(_call_ids)
        with self._changed:
            if self._over:
                raise Conflict("AttemptOver", "the attempt that this thread belongs to is over")
            self._awaited[call_id] = None
        try:
            self._send(Call(call_id, action))
            with self._changed:
                while (reply := self._awaited[call_id]) is None:
                    self._changed.wait()
        finally:
            with self._changed:
                del self._awaited[call_id]
        if reply.problem is not None:
            raise _error(reply.problem)
        return reply.value

    def report(self, fields: dict[str, Any]) -> None:
        if not self._over:
            self._send(Progress(fields))

    def wait(self, seconds: float) -> None:
        with self._changed:
            # A cancel that came before won't notify again.
            if not self._canceled:
                self._changed.wait(seconds)

    def spark(self) -> SparkSession:
        with self._opening_spark:
            if self._spark is None:
                self._spark = self._begin_spark()
        # A cancel that came while it was being opened found nothing to interrupt.
        if self._canceled:
            raise Conflict("Canceled", "the attempt is canceled")
        return cast("SparkSession", self._spark.session)

    def reply(self, reply: Reply) -> None:
        with self._changed:
            if reply.call_id in self._awaited:
                self._awaited[reply.call_id] = reply
                self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._canceled = True
            self._changed.notify_all()
        if self._spark is not None:
            self._spark.interrupt()

    def pause(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def renew(self, token: str) -> None:
        if not self._over:
            os.environ[CAPABILITY_VARIABLE] = token

    def finish(self) -> None:
        """Send nothing more for this attempt."""
        with self._changed:
            self._over = True

    @property
    def holds_spark(self) -> bool:
        return self._spark is not None

    def end_spark(self) -> None:
        if self._spark is not None:
            self._spark.end()

    def _begin_spark(self) -> SparkAttempt:
        task = self._run.task
        if self._run.spark is None:
            raise Invalid("NoSpark", f"the runtime {task.runtime!r} has no Spark: use ecs_spark, or arrow()")
        from tracelake.worker.spark import session as spark_session

        connection = spark_session.open_session(self._run.spark)
        return spark_session.begin(
            connection, str(task.task_id), task.attempt, task.epoch or 0, self.on_spark_progress
        )


def _error(problem: CallProblem) -> TracelakeError:
    return errors.error_of(problem.status, problem.reason, problem.message)
