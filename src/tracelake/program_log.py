"""The output of a supervised program, in a file of limited size.

A client of a server can make it print, so an unlimited log would let unauthenticated clients fill the disk. So a
program gets the write end of a pipe and no file, and can't make its supervisor write anywhere else. A thread of
the supervisor reads the other end, cuts lines that are too long for people, and starts a new file when the
current one is large; the previous one is kept. The program waits no longer than the thread takes to read, and a
full disk costs the log, never the program. The last lines are kept in memory, to report why a program ended.

``ProgramLog`` also passes lines to its supervisor, and can send the program one secret message the other way,
which it reads from its standard output before it prints anything: unlike arguments, variables and files, that
leaves no trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

LARGEST_FILE = 8 * 1024 * 1024
LONGEST_LINE = 16 * 1024
_READ_BYTES = 1024 * 1024
_TAIL_BYTES = 64 * 1024
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_LINES = 40
# Between two line breaks, so that a program can't make its supervisor look at each of very many short lines.
_TOO_LONG = re.compile(rb"[^\n]{%d,}" % (LONGEST_LINE + 1))
# A Java stack trace means nothing to most people, and would push out the line that says what went wrong.
_STACK = ("\tat ", "\t... ")


class CappedFile:
    """``path`` and its predecessor, ``path.1``, have little more than ``largest`` bytes each."""

    def __init__(self, path: Path, largest: int = LARGEST_FILE) -> None:
        self._path = path
        self._largest = largest
        self._length = 0
        self._cut = 0

    def check(self) -> None:
        """Create the file; ``OSError`` when it can't be written, for example when its place is taken by a link."""
        os.close(os.open(self._path, _FLAGS, 0o600))

    def write(self, text: bytes) -> None:
        """Write; never raises because of the disk."""
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
        """A mark at the end of a line shows that it was cut; the end may come with a later piece."""
        first, line_break, rest = text.partition(b"\n")
        begun = self._fitting(first)
        if not line_break:
            return begun
        whole, line_break, last = rest.rpartition(b"\n")
        ended = begun + self._end_of_line() + _TOO_LONG.sub(_cut_line, whole) + line_break
        return ended + self._fitting(last)

    def _fitting(self, part: bytes) -> bytes:
        """As much of a piece as its line has room for."""
        fitting = part[: LONGEST_LINE - self._length]
        self._length += len(fitting)
        self._cut += len(part) - len(fitting)
        return fitting

    def _end_of_line(self) -> bytes:
        ended = _mark(self._cut) + b"\n"
        self._length = self._cut = 0
        return ended


def _cut_line(line: re.Match[bytes]) -> bytes:
    return line[0][:LONGEST_LINE] + _mark(len(line[0]) - LONGEST_LINE)


def _mark(cut: int) -> bytes:
    return b" (and %d bytes more)" % cut if cut else b""


class CappedLog:
    """Copies a program's output to ``path`` until the last process that holds the pipe has ended. ``write_fd`` is
    for the program; close it here (``handed_on``) once the program has it."""

    def __init__(self, path: Path) -> None:
        """``OSError`` when there can't be such a file."""
        self._file = CappedFile(path)
        self._file.check()
        self._tail = b""
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
        """Wait for the program's last output; a process that it left behind may hold the pipe open."""
        self._ended.wait(timeout)

    def tail(self) -> str:
        """The end of the program's output so far."""
        return self._tail.decode("utf-8", "replace")

    def _read(self) -> None:
        try:
            while chunk := os.read(self._read_fd, _READ_BYTES):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
                self._file.write(chunk)
        finally:
            os.close(self._read_fd)
            self._ended.set()


class ProgramLog:
    """``on_line`` is called with every line. ``write_fd`` is for the program; close it here once the program has
    it. ``message`` is what the program can read from it, once."""

    def __init__(self, path: Path, on_line: Callable[[str], None], message: bytes | None = None) -> None:
        self._file = CappedFile(path)
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""
        self._read_fd, self.write_fd = os.pipe() if message is None else _socket_with_message(message)
        os.set_blocking(self._read_fd, False)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._read_fd, self._read)

    def handed_on(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def tail(self, lines: int = 10) -> str:
        return "\n".join(list(self._lines)[-lines:])

    async def drained(self, timeout: float) -> None:
        """Wait for the program's last output; a child that it left behind may hold the pipe open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._ended.wait()

    def close(self) -> None:
        self.handed_on()
        if self._read_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1
        self._ended.set()

    def _read(self) -> None:
        try:
            chunk = os.read(self._read_fd, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self.close()
            return
        self._file.write(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, self._rest = [*lines, self._rest[:LONGEST_LINE]], b""
        for raw in lines:
            line = raw[:LONGEST_LINE].decode("utf-8", "replace").rstrip("\r")
            if not line.startswith(_STACK):
                self._lines.append(line)
            self._on_line(line)


def _socket_with_message(message: bytes) -> tuple[int, int]:
    """Both ends of a socket, with the message ready to be read at the other end."""
    ours, theirs = socket.socketpair()
    try:
        # Nothing reads yet: the message must fit into the kernel's buffer.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(message) + 65536)
        ours.setblocking(False)
        if ours.send(message) != len(message):
            raise OSError("the message does not fit the socket buffer")
        ours.shutdown(socket.SHUT_WR)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return ours.detach(), theirs.detach()
