"""Reading a log from its end on, while somebody writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tracelake.objects import beneath

POLL = 0.2
"""Seconds between two looks at a log that is followed."""
_CHUNK = 1024 * 1024


class Tail:
    """Whole lines, each once. A log that was begun anew is read from its beginning; one that is gone has none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._rest: list[bytes] = []

    def lines(self) -> Iterator[bytes]:
        """What has come since the last time, without the line that isn't finished yet."""
        try:
            file = self._open()
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._place:
                self._place, self._rest = 0, []
            file.seek(self._place)
            while chunk := file.read(_CHUNK):
                self._place += len(chunk)
                head, *more = chunk.split(b"\n")
                self._rest.append(head)
                if more:
                    yield b"".join(self._rest)
                    *whole, last = more
                    self._rest = [last]
                    yield from whole

    def _open(self) -> BinaryIO:
        """A plain file and no link: people read logs with more rights than those who might have put one there."""
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.fdopen(beneath.open_file(folder, self._path.name), "rb")
        finally:
            os.close(folder)

    def rest(self) -> Iterator[bytes]:
        """The unfinished line, when nobody will finish it."""
        rest, self._rest = b"".join(self._rest), []
        if rest:
            yield rest
