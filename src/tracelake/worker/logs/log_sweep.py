"""Old attempt logs make room: those of more than a week ago, and the oldest while all together hold too much.

A log that is being written is among the newest. What another worker removes at the same time is no error.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KEPT_SECONDS = 7 * 24 * 3600.0
KEPT_BYTES = 1024**3


@dataclass(frozen=True, slots=True)
class _Log:
    path: Path
    bytes: int
    changed: float


def sweep_logs(
    folder: Path, *, seconds: float = KEPT_SECONDS, total: int = KEPT_BYTES, now: float | None = None
) -> int:
    """How many were removed. Blocks for as long as the disk does."""
    oldest = (time.time() if now is None else now) - seconds
    room = total
    removed = 0
    for log in sorted(_logs(folder), key=lambda each: each.changed, reverse=True):
        room -= log.bytes
        if log.changed < oldest or room < 0:
            with suppress(OSError):
                log.path.unlink()
                removed += 1
            # Only when it was the last one in its folder.
            with suppress(OSError):
                log.path.parent.rmdir()
    return removed


def _logs(folder: Path) -> Iterator[_Log]:
    for path in folder.glob("*/*.log"):
        with suppress(OSError):
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode):
                yield _Log(path, found.st_size, found.st_mtime)
