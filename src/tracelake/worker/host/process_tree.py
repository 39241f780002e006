"""Whose children are whose, as the kernel tells it, and the end of one's own.

The numbers are those of ``/proc``: it must belong to the caller's own process namespace.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def children_of(pid: int) -> list[int]:
    """Also of its other threads; nothing when it is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}"):
            return _by_parent(pid)
    except ProcessLookupError:
        pass
    return found


class ChildrenFile:
    """Whether another process has children, as often as one likes to know: the question costs one system call.

    Children of its first thread, that is, and of threads that have ended: theirs become the first one's.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    @property
    def any(self) -> bool | None:
        """None when it can't be told: the kernel keeps no list, or the process is gone."""
        if self._descriptor < 0:
            return None
        try:
            return bool(os.pread(self._descriptor, 1, 0))
        except OSError:
            return None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def kill_children() -> None:
    """Until none is left; for a process that adopts orphans that means: no descendant."""
    while True:
        for pid in children_of(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _by_parent(pid: int) -> list[int]:
    """For kernels that keep no list: every process is asked for its parent."""
    found: list[int] = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name in parentheses may hold anything, parentheses and spaces included.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(name))
    return found
