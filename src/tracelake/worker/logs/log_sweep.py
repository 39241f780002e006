"""Old attempt logs make room: those of more than a week ago, and the oldest while all together hold too much.

A log that is being written is among the newest. What another worker removes at the same time is no error.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tracelake.objects import beneath

KEPT_SECONDS = 7 * 24 * 3600.0
KEPT_BYTES = 1024**3


@dataclass(frozen=True, slots=True)
class _Log:
    task: str
    name: str
    bytes: int
    changed: float


def sweep_logs(
    folder: Path, *, seconds: float = KEPT_SECONDS, total: int = KEPT_BYTES, now: float | None = None
) -> int:
    """How many were removed. Blocks for as long as the disk does."""
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
                # Only when it was the last one in its folder.
                with suppress(OSError):
                    os.rmdir(log.task, dir_fd=root)
    finally:
        os.close(root)
    return removed


def _logs(root: int) -> Iterator[_Log]:
    for task in os.listdir(root):
        with suppress(OSError), _opened(root, task) as folder:
            for name in os.listdir(folder):
                with suppress(OSError):
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if name.endswith(".log") and stat.S_ISREG(found.st_mode):
                        yield _Log(task, name, found.st_size, found.st_mtime)


@contextmanager
def _opened(root: int, task: str) -> Iterator[int]:
    folder = beneath.open_folder(root, task)
    try:
        yield folder
    finally:
        os.close(folder)
