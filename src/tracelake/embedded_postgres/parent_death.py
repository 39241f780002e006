"""Ask the kernel to end a child when its parent ends, however that comes about.

``arm`` runs in the child between fork and exec, and after the change of user, which would make the kernel
forget the request. Little may be done there safely in a process with threads, so everything is looked up
beforehand and the child makes two system calls. Elsewhere than on Linux there is no such request, and a
server outlives a killed launcher until the next start waits for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def arm() -> Callable[[], None] | None:
    """What the child has to call, bound to this process as its parent."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()
    # SIGINT is Postgres' fast shutdown: sessions are ended, the data is checkpointed.
    wish = (_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)

    def in_child() -> None:
        if prctl(*wish) != 0 or os.getppid() != parent:
            os._exit(1)

    return in_child
