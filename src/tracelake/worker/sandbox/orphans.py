"""The last of a sandbox is reaped by us.

bubblewrap ends before the first process inside has, which then falls to whoever takes the orphans. In a container
that is often somebody who never looks at them, and each sandbox would leave a zombie. So while sandboxes are open,
this process takes its orphans itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_open = 0


def take_orphans() -> None:
    global _open
    _open += 1
    _set(True)


def leave_orphans() -> None:
    global _open
    _open -= 1
    if _open == 0:
        _set(False)


def _set(on: bool) -> None:
    """Without it zombies stay for longer, which is no reason to refuse anything."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def number_of(pidfd: int) -> int:
    """The process that a descriptor stands for; -1 once it has been reaped."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1


def reap(init: int, group: int) -> None:
    """The first process, which has ended, and the doorman if bubblewrap was killed before it could see to him."""
    for which in (init, -group):
        with contextlib.suppress(ChildProcessError):
            while abs(which) != 1 and os.waitpid(which, os.WNOHANG)[0] > 0:
                pass


def reap_group(group: int) -> None:
    """Every process of a group that has been killed, as soon as each has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)
