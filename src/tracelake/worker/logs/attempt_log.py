"""One attempt's log: what the operator printed, and what the wrapper has to say about it.

The operator gets the end of a pipe and no file. The wrapper drains the pipe as long as the attempt lives, whatever
comes: secrets are taken out, at most ``CAP`` bytes are kept, the rest is read and dropped, and a full disk loses
lines but no work. Once the log is closed, nothing can be written to it any more: who still holds the pipe, writes
to nobody. The file, ``{folder}/{task_id}/{attempt}.log``, appears with its first byte; an attempt that printed
nothing has none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

from tracelake.domain.errors import Invalid
from tracelake.worker.logs.log_file import LogFile
from tracelake.worker.logs.redaction import Redaction

CAP: Final = 32 * 1024 * 1024
_CHUNK = 64 * 1024
_PIPE_PIECES = 4
_LAST_WORDS_SECONDS = 0.5
_LISTEN_AFTER = 0.005
"""What an attempt prints that is over by then is found in the pipe when the log is closed."""
_NOTE_CHARACTERS = 16 * 1024


def log_path(folder: Path, task_id: str, attempt: int) -> Path:
    """Both come from a message: neither may lead anywhere else."""
    try:
        name = str(UUID(task_id))
    except (ValueError, AttributeError, TypeError):
        raise Invalid("TaskIdInvalid", f"not a task id: {str(task_id)[:100]!r}") from None
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
        # Only our end: an operator expects its output to wait rather than to fail.
        os.set_blocking(self.write_fd, True)
        self._is_read = False
        self._listening = self._loop.call_later(_LISTEN_AFTER, self._listen)

    @classmethod
    def open(cls, folder: Path, task_id: str, attempt: int, redact: Sequence[str]) -> AttemptLog:
        """``redact`` are secrets, the attempt's token among them."""
        return cls(LogFile(log_path(folder, task_id, attempt)), redact)

    @property
    def path(self) -> Path:
        return self._file.path

    def note(self, text: str) -> None:
        """A line of the wrapper's own; comes after what the operator printed before, and is kept in any case."""
        self._catch_up()
        said = self._redaction.text(text)
        for line in said[:_NOTE_CHARACTERS].splitlines():
            self._file.line(f"[tracelake] {line}")

    async def close(self) -> None:
        """What is in the pipe still gets into the log. A leftover that holds the pipe open isn't waited for."""
        if self.write_fd < 0:
            return
        os.close(self.write_fd)
        self.write_fd = -1
        self._listening.cancel()
        self._catch_up()
        if not self._ended:
            await self._last_words()
        self._stop_reading()
        os.close(self._read_fd)
        self._keep(self._redaction.finish())
        if self._dropped:
            self._file.line(f"[tracelake] {self._dropped} bytes more were printed and not kept")
        self._file.close()

    async def _last_words(self) -> None:
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
        """What is in the pipe now, and no more: an operator may print without end."""
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
