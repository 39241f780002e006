"""The invoker's journal: a file with the attempts it has started, so that its successor knows them.

An attempt is recorded before its function starts, and again when the Dispatcher has answered the report of its end.
The successor of an invoker that was killed finds the attempts without an end, whose functions died with it, and
reports them at once; otherwise their leases would have to run out. Ended attempts are remembered for a while, so
that an invocation that is delivered twice runs once.

One JSON object per line. Each is appended by one write that first ends the line before, so that a truncated line
(crash, full disk) costs only itself. Writes survive the process but needn't survive the machine: when that goes
down, the lease expires. The file holds lease tokens and is readable by its owner alone.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from functools import partial
from pathlib import Path
from uuid import UUID

import msgspec
import structlog

from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import CompleteRequest
from tracelake.leases.report import CompletionClient, report_completion
from tracelake.worker.lambda_.completion_shim import failed

MAX_REMEMBERED = 10_000
_COMPACT_AFTER = 4 * MAX_REMEMBERED
AttemptKey = tuple[UUID, int]
_KILLED = "the invoker ended while the function ran"

_log = structlog.get_logger(__name__)


class AttemptFence(msgspec.Struct, frozen=True):
    """The identity of an attempt, enough to report its end."""

    task_id: UUID
    attempt: int
    lease_token: UUID

    @property
    def key(self) -> AttemptKey:
        return self.task_id, self.attempt

    def __repr__(self) -> str:
        return f"Fence({self.task_id}, attempt {self.attempt})"


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    begin: AttemptFence | None = None
    end: AttemptKey | None = None


_decoder = msgspec.json.Decoder(_Line)


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[AttemptKey, AttemptFence] = {}
        self._ended: OrderedDict[AttemptKey, None] = OrderedDict()
        self._lines = 0
        self._file = -1
        self._read()
        self._rewrite()

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._open or key in self._ended

    @property
    def unfinished(self) -> list[AttemptFence]:
        return list(self._open.values())

    def begin(self, fence: AttemptFence) -> None:
        # The file first: a function whose start isn't recorded must not start.
        self._append(_Line(begin=fence))
        self._open[fence.key] = fence

    def end(self, fence: AttemptFence) -> None:
        # Memory first: also when the disk is full, the attempt must not run again here.
        self._open.pop(fence.key, None)
        self._remember(fence.key)
        self._append(_Line(end=fence.key))

    def close(self) -> None:
        os.close(self._file)
        self._file = -1

    def _append(self, line: _Line) -> None:
        data = b"\n" + msgspec.json.encode(line)
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(f"{self._path}: the disk took {written} of {len(data)} bytes")
        self._lines += 1
        if self._lines > _COMPACT_AFTER:
            self._rewrite()

    def _remember(self, key: AttemptKey) -> None:
        self._ended[key] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _read(self) -> None:
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for text in lines:
            try:
                line = _decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if line.begin is not None:
                self._open[line.begin.key] = line.begin
            if line.end is not None:
                self._open.pop(line.end, None)
                self._remember(line.end)

    def _rewrite(self) -> None:
        """Replace the file by a shorter one, atomically."""
        kept = [_Line(end=key) for key in self._ended] + [_Line(begin=fence) for fence in self._open.values()]
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.unlink(missing_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # A copy: closing the writer must leave open the descriptor that later lines go to.
        with os.fdopen(os.dup(file), "wb") as out:
            out.writelines(msgspec.json.encode(line) + b"\n" for line in kept)
        os.replace(temporary, self._path)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._lines = file, len(kept)


class JournaledReports:
    """Reports the end of an attempt, and closes it in the journal once the Dispatcher has answered."""

    def __init__(self, client: CompletionClient, journal: Journal) -> None:
        self._client = client
        self._journal = journal

    async def report(self, fence: AttemptFence, task: Invocation, completion: CompleteRequest | None) -> None:
        """None: no report is expected, since the task was canceled or belongs to another attempt."""
        if completion is None or await self._is_answered(completion, task):
            self._close(fence)

    async def report_dead(self, fence: AttemptFence) -> None:
        """Report an attempt whose function died with an earlier invoker."""
        if await self._is_answered(CompleteRequest.of(fence, "Failed", _KILLED), None):
            self._close(fence)

    async def _is_answered(self, completion: CompleteRequest, task: Invocation | None) -> bool:
        log = _log.bind(task_id=str(completion.task_id), attempt=completion.attempt)
        report = await report_completion(
            self._client,
            completion,
            log,
            as_failure=None if task is None else partial(failed, task, retryable=False),
            # Ordinary here: the function may have completed its task itself.
            superseded_level=logging.INFO,
        )
        return report.is_answered

    def _close(self, fence: AttemptFence) -> None:
        """If it can't be written, a successor reports the attempt once more, and is refused."""
        try:
            self._journal.end(fence)
        except OSError as error:
            _log.warning("journal_unusable", task_id=str(fence.task_id), error=str(error))
