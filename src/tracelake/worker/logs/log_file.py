"""A log file that survives a full disk: what can't be written is counted, and said as soon as there's room.

It is made with its first byte, for its owner alone, and never through a link. A sweep that removes an empty folder
at the same moment is outwaited by making it again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tracelake.objects import beneath

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
_TRIES = 3


class LogFile:
    """Never raises for what the disk does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._mid_line = False
        self._lost = 0
        self._why = ""

    def write(self, text: bytes) -> None:
        if self._lost and not self._tell_what_was_lost():
            self._lost += len(text)
            return
        self._put(text)

    def line(self, text: str) -> None:
        """On a line of its own."""
        begin = "\n" if self._mid_line else ""
        self.write(f"{begin}{text}\n".encode("utf-8", "replace"))

    def close(self) -> None:
        if self._lost:
            self._tell_what_was_lost()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _tell_what_was_lost(self) -> bool:
        lost, self._lost = self._lost, 0
        begin = "\n" if self._mid_line else ""
        self._put(f"{begin}[tracelake] {lost} bytes were lost here: {self._why}\n".encode())
        if self._lost:
            # Not even that could be written, or not whole; what counts is what the operator printed.
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
