"""What a supervised program prints, read by its supervisor: line by line, into a file that doesn't grow for ever.

The program gets the end of a pipe and no file, so it can't make its supervisor write anywhere else, and it
can't fill the disk. The last lines are kept in memory, to say why a program ended.

What a program has to know and nobody else may is sent to it the other way, to be read from its standard output
before it prints anything: unlike arguments, variables and files, that leaves no trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tracelake.capped_log import LONGEST_LINE, CappedFile

_KEPT_LINES = 40
# Where Java was when it failed says nothing to most people, and would push out what went wrong.
_STACK = ("\tat ", "\t... ")


class ProgramLog:
    """``on_line`` hears every line. ``write_fd`` is for the program; close it here once it has been handed on.
    ``told`` is what the program can read from it, once."""

    def __init__(self, path: Path, on_line: Callable[[str], None], told: bytes | None = None) -> None:
        self._file = CappedFile(path)
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""
        self._read_fd, self.write_fd = os.pipe() if told is None else _talking(told)
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
        """Wait for what the program said last; a child that it left behind may hold the pipe open."""
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


def _talking(told: bytes) -> tuple[int, int]:
    """Both ends of a socket, with what the other end can read already in it."""
    ours, theirs = socket.socketpair()
    try:
        # Nobody reads yet: it must fit into what the kernel keeps.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(told) + 65536)
        ours.setblocking(False)
        if ours.send(told) != len(told):
            raise OSError("too much to tell a program")
        ours.shutdown(socket.SHUT_WR)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return ours.detach(), theirs.detach()
