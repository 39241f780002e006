"""What slots write to standard error: drained for good, of which the last is kept to explain a failure.

It is for the log, so it quotes no query: a process gives its standard error up before it is given any.
"""

from __future__ import annotations

import asyncio
import os

_KEPT = 4096


class SlotOutput:
    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._kept = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._drain)

    def _drain(self) -> None:
        try:
            self._kept = (self._kept + os.read(self._read_fd, 65536))[-_KEPT:]
        except BlockingIOError:
            return

    def take(self) -> str:
        self._drain()
        kept, self._kept = self._kept, b""
        return kept.decode(errors="replace").strip()

    def close(self) -> None:
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        os.close(self.write_fd)
