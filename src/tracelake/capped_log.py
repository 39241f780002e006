"""What a program prints, in a file that doesn't grow for ever.

Whoever may talk to a program may make it print: a server's log is as long as strangers like it to be. So a program
gets the end of a pipe and no file. A thread of its supervisor reads the other end, cuts what is no line for people,
and begins the file anew when it is large; the one before is kept. A program waits for the thread at most as long as
the thread takes to read, and a disk that is full costs the log, never the program.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path

LARGEST_FILE = 8 * 1024 * 1024
LONGEST_LINE = 16 * 1024
_READ_BYTES = 1024 * 1024
_TAIL_BYTES = 64 * 1024
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class CappedFile:
    """``path`` and what it was before, ``path.1``, have at most ``largest`` bytes each and a little more."""

    def __init__(self, path: Path, largest: int = LARGEST_FILE) -> None:
        self._path = path
        self._largest = largest
        self._length = 0
        self._cut = 0

    def check(self) -> None:
        """Make it; ``OSError`` when it can't be written, as when somebody has put a link in its place."""
        os.close(os.open(self._path, _FLAGS, 0o600))

    def write(self, text: bytes) -> None:
        """Never raises for what the disk does."""
        text = self._without_long_lines(text)
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size > self._largest:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            descriptor = os.open(self._path, _FLAGS, 0o600)
            try:
                os.write(descriptor, text)
            finally:
                os.close(descriptor)

    def _without_long_lines(self, text: bytes) -> bytes:
        """What is cut is said at the end of its line, which may come with a later piece."""
        kept = bytearray()
        for place, part in enumerate(text.split(b"\n")):
            if place:
                kept += b" (and %d bytes more)\n" % self._cut if self._cut else b"\n"
                self._length = self._cut = 0
            fitting = part[: LONGEST_LINE - self._length]
            kept += fitting
            self._length += len(fitting)
            self._cut += len(part) - len(fitting)
        return bytes(kept)


class CappedLog:
    """``write_fd`` is for the program; close it here (``handed_on``) once the program has it. What it prints goes
    to ``path``, until the last process that holds the pipe is gone."""

    def __init__(self, path: Path) -> None:
        """``OSError`` when there can't be such a file."""
        self._file = CappedFile(path)
        self._file.check()
        self._said = b""
        self._ended = threading.Event()
        self._read_fd, self.write_fd = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, _READ_BYTES)
        threading.Thread(target=self._read, name=f"log-{path.name}", daemon=True).start()

    def handed_on(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def drained(self, timeout: float) -> None:
        """Wait for what the program said last; a process that it left behind may hold the pipe open."""
        self._ended.wait(timeout)

    def said(self) -> str:
        """The end of what this program has printed so far."""
        return self._said.decode("utf-8", "replace")

    def _read(self) -> None:
        try:
            while chunk := os.read(self._read_fd, _READ_BYTES):
                self._said = (self._said + chunk)[-_TAIL_BYTES:]
                self._file.write(chunk)
        finally:
            os.close(self._read_fd)
            self._ended.set()
