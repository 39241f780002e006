"""Attempt logs: the operator's output and the wrapper's notes, without secrets, bounded, and safe on a full disk.

The operator gets the write end of a pipe and no file. The wrapper drains the pipe for as long as the attempt
lives: it redacts secrets, keeps at most ``CAP`` bytes, and reads and drops the rest. Once the log is closed
nothing can be written to it any more, even if a process still holds the pipe. The file,
``{folder}/{task_id}/{attempt}.log``, appears with its first byte; an attempt that printed nothing has none.

``LogFile`` survives a full disk: it counts the lines that can't be written and reports the number as soon as
there is room. The file is created for its owner alone and never through a link. A sweep may remove the empty
folder at the same moment; then it is created again.

``Redaction`` removes secrets from a stream of bytes that arrives in pieces of any size: as they are, as JSON or
Python would print them, URL-encoded, and line by line if they have several lines. Bytes at the end of a piece
that could begin a secret are held back; everything else passes at once. Values shorter than ``SHORTEST`` are left
alone: removing every ``1`` from a log hides nothing.

``sweep_logs`` removes logs older than a week, and the oldest ones while the total is too large. A log that is
being written is among the newest. Files that another worker removes at the same time are no error.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import quote, quote_plus
from uuid import UUID

from tracelake.domain.errors import Invalid
from tracelake.objects import beneath

CAP: Final = 32 * 1024 * 1024
_CHUNK = 64 * 1024
_PIPE_PIECES = 4
_LAST_WORDS_SECONDS = 0.5
_LISTEN_AFTER = 0.005
"""The output of an attempt that ends sooner is read from the pipe when its log is closed."""
_NOTE_CHARACTERS = 16 * 1024
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
_TRIES = 3
SHORTEST_SECRET = 4
MASK = "•••".encode()
KEPT_SECONDS = 7 * 24 * 3600.0
KEPT_BYTES = 1024**3


def log_path(folder: Path, task_id: str, attempt: int) -> Path:
    """The log's path. Both names come from a message: neither may lead out of the folder."""
    try:
        name = str(UUID(task_id))
    except (ValueError, AttributeError, TypeError):
        raise Invalid("TaskIdInvalid", f"not a task id: {str(task_id)[:100]!r}") from None
    # True is an int as well.
    if isinstance(attempt, bool) or not isinstance(attempt, int) or not 0 < attempt < 2**63:
        raise Invalid("AttemptInvalid", f"not an attempt: {str(attempt)[:100]}")
    return Path(f"{folder}/{name}/{attempt}.log")


class AttemptLog:
    """``write_fd`` is for the operator; it is closed here."""

    def __init__(self, file: LogFile, redact: Sequence[str], cap: int = CAP) -> None:
        self._file = file
        self._redaction = Redaction(redact)
        self._cap = cap
        self._kept = 0
        self._dropped = 0
        self._ended = False
        self._at_end: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Our end only: an operator expects writes to block rather than to fail.
        os.set_blocking(self.write_fd, True)
        self._is_read = False
        self._listening = self._loop.call_later(_LISTEN_AFTER, self._listen)

    @classmethod
    def open(cls, folder: Path, task_id: str, attempt: int, redact: Sequence[str]) -> AttemptLog:
        """``redact`` are the secrets to remove, the attempt's token among them."""
        return cls(LogFile(log_path(folder, task_id, attempt)), redact)

    @property
    def path(self) -> Path:
        return self._file.path

    def note(self, text: str) -> None:
        """Add a line of the wrapper's own, after the operator's output so far; it is kept even beyond the cap."""
        self._catch_up()
        # Redacted before it is cut: half of a secret wouldn't be recognised.
        redacted = self._redaction.text(text)
        for line in redacted[:_NOTE_CHARACTERS].splitlines():
            self._file.line(f"[tracelake] {line}")

    async def close(self) -> None:
        """Read the rest of the pipe into the log. A process that still holds the pipe open isn't waited for."""
        if self.write_fd < 0:
            return
        # Our own copy first: the pipe ends when every writer has closed it.
        os.close(self.write_fd)
        self.write_fd = -1
        self._listening.cancel()
        self._catch_up()
        if not self._ended:
            await self._log_tail()
        self._stop_reading()
        os.close(self._read_fd)
        self._keep(self._redaction.finish())
        if self._dropped:
            self._file.line(f"[tracelake] {self._dropped} bytes more were printed and not kept")
        self._file.close()

    async def _log_tail(self) -> None:
        self._at_end = self._loop.create_future()
        self._listen()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._at_end

    def _listen(self) -> None:
        if not self._ended and not self._is_read:
            self._is_read = True
            self._loop.add_reader(self._read_fd, self._readable)

    def _stop_reading(self) -> None:
        if self._is_read:
            self._is_read = False
            self._loop.remove_reader(self._read_fd)

    def _catch_up(self) -> None:
        """Read the pipe's current content and no more: an operator may print without end."""
        for _ in range(_PIPE_PIECES):
            if self._ended or not self._readable():
                return

    def _readable(self) -> bool:
        try:
            piece = os.read(self._read_fd, _CHUNK)
        except BlockingIOError:
            return False
        if not piece:
            self._stop_reading()
            self._ended = True
            if self._at_end is not None and not self._at_end.done():
                self._at_end.set_result(None)
        elif self._dropped:
            # Past the cap nothing is kept, so nothing has to be redacted.
            self._dropped += len(piece)
        else:
            self._keep(self._redaction.feed(piece))
        return True

    def _keep(self, text: bytes) -> None:
        room = self._cap - self._kept
        if room > 0 and text:
            self._file.write(text[:room])
            self._kept += min(room, len(text))
        if len(text) > room and not self._dropped:
            self._file.line(f"[tracelake] the log is cut here: an attempt's log holds {self._cap} bytes")
        self._dropped += max(0, len(text) - room)


class LogFile:
    """A log file that never raises because of the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._mid_line = False
        self._lost = 0
        self._why = ""

    def write(self, text: bytes) -> None:
        if self._lost and not self._report_lost_bytes():
            self._lost += len(text)
            return
        self._put(text)

    def line(self, text: str) -> None:
        """Write a line of its own."""
        begin = "\n" if self._mid_line else ""
        self.write(f"{begin}{text}\n".encode("utf-8", "replace"))

    def close(self) -> None:
        if self._lost:
            self._report_lost_bytes()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _report_lost_bytes(self) -> bool:
        lost, self._lost = self._lost, 0
        begin = "\n" if self._mid_line else ""
        self._put(f"{begin}[tracelake] {lost} bytes were lost here: {self._why}\n".encode())
        if self._lost:
            # This note couldn't be written either, or not completely; the operator's lines are what counts.
            self._lost = lost
            return False
        return True

    def _put(self, text: bytes) -> None:
        written = 0
        try:
            if self._descriptor < 0:
                self._descriptor = _open(self.path)
            while written < len(text):
                written += os.write(self._descriptor, memoryview(text)[written:])
        except OSError as error:
            self._lost += len(text) - written
            self._why = error.strerror or type(error).__name__
        if written:
            self._mid_line = text[written - 1 : written] != b"\n"


def _open(path: Path) -> int:
    logs, task = path.parent.parent, path.parent.name
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                return _open_in(root, task, path.name)
        return _open_in(root, task, path.name)
    finally:
        os.close(root)


def _open_in(root: int, task: str, name: str) -> int:
    folder = beneath.make_folder(root, task, 0o700)
    try:
        return beneath.open_beneath(folder, name, _FLAGS, 0o600)
    finally:
        os.close(folder)


class Redaction:
    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(secrets)
        self._held = b""

    @cached_property
    def _forms(self) -> list[bytes]:
        """All spellings of the secrets; computed with the first output, which most attempts never have."""
        # The longest first, since one may be part of another.
        forms = {form for secret in self._secrets for form in _forms(secret)}
        return sorted(forms, key=len, reverse=True)

    def feed(self, piece: bytes) -> bytes:
        """The bytes that may be shown now."""
        text = self._replace(self._held + piece)
        keep = max((_overhang(text, form) for form in self._forms), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> bytes:
        """The bytes that were held back: with nothing more to come they are no secret."""
        rest, self._held = self._held, b""
        return rest

    def text(self, text: str) -> str:
        """Redact a complete text."""
        return self._replace(text.encode("utf-8", "replace")).decode("utf-8", "replace")

    def _replace(self, text: bytes) -> bytes:
        for form in self._forms:
            text = text.replace(form, MASK)
        return text


def _forms(secret: str) -> set[bytes]:
    texts = {secret, *secret.splitlines()}
    texts |= {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    texts |= {quote(secret, safe=""), quote_plus(secret)}
    return {text.encode("utf-8", "replace") for text in map(str.strip, texts) if len(text) >= SHORTEST_SECRET}


def _overhang(text: bytes, form: bytes) -> int:
    """The number of bytes at the end that could be the beginning of ``form``."""
    # A whole form was replaced before, so at least its last byte is missing here.
    start = max(0, len(text) - len(form) + 1)
    while (start := text.find(form[0], start)) >= 0:
        if form.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


@dataclass(frozen=True, slots=True)
class _SweptLog:
    task: str
    name: str
    bytes: int
    changed: float


def sweep_logs(
    folder: Path, *, seconds: float = KEPT_SECONDS, total: int = KEPT_BYTES, now: float | None = None
) -> int:
    """Remove old logs; the result is their number. Blocks for as long as the disk does."""
    oldest = (time.time() if now is None else now) - seconds
    room = total
    removed = 0
    try:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        for log in sorted(_logs(root), key=lambda each: each.changed, reverse=True):
            room -= log.bytes
            if log.changed < oldest or room < 0:
                with suppress(OSError), _opened(root, log.task) as task:
                    os.unlink(log.name, dir_fd=task)
                    removed += 1
                # Fails unless this was the folder's last log.
                with suppress(OSError):
                    os.rmdir(log.task, dir_fd=root)
    finally:
        os.close(root)
    return removed


def _logs(root: int) -> Iterator[_SweptLog]:
    for task in os.listdir(root):
        with suppress(OSError), _opened(root, task) as folder:
            for name in os.listdir(folder):
                with suppress(OSError):
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if name.endswith(".log") and stat.S_ISREG(found.st_mode):
                        yield _SweptLog(task, name, found.st_size, found.st_mtime)


@contextmanager
def _opened(root: int, task: str) -> Iterator[int]:
    folder = beneath.open_folder(root, task)
    try:
        yield folder
    finally:
        os.close(folder)
