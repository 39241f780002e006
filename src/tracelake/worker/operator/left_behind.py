"""What an operator has left in its process: children, and threads that run somebody's code.

A process with leftovers isn't used again: they would write into the next attempt's log and hold its memory.
Threads of Spark's client and idle pool threads are no leftovers; they do nothing by themselves.
"""

from __future__ import annotations

import os
import sys
import threading

_HARMLESS = frozenset(
    {"threading", "queue", "concurrent", "multiprocessing", "weakref", "grpc", "pyspark", "tracelake"}
)


def children_are_left() -> bool:
    """Also grandchildren whose parents are gone, where this process adopts them. The dead are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def threads_are_left(before: set[int]) -> bool:
    """Compared with the threads' identities before the attempt."""
    if any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
        return True
    return any(
        _runs_foreign_code(ident) for ident in thread_idents() - before if ident != threading.get_ident()
    )


def thread_idents() -> set[int]:
    """Of all threads that run Python, whoever started them."""
    return set(sys._current_frames())


def _runs_foreign_code(ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _HARMLESS:
            return True
        frame = frame.f_back
    return False
