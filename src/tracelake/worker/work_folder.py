"""A worker's own folder for as long as it lives.

It is locked by its worker and removed when the worker ends. One that was killed can't; so each worker that starts
removes the folders beside its own whose lock nobody holds. What can't be removed stays, and is logged. Only workers
of one runtime have folders beside each other: an invoker keeps what its successor needs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tracelake.trees import remove_if_possible


@contextmanager
def own_work_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    try:
        for other in folder.parent.iterdir():
            if other != folder and other.is_dir() and not other.is_symlink():
                _remove_if_left(other)
        yield
    finally:
        remove_if_possible(folder)
        if lock is not None:
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    lock = _lock(folder)
    if lock is not None:
        remove_if_possible(folder)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """None when somebody else holds it, or it is gone or not ours to look at."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
