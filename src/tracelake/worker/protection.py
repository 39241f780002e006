"""Keep other processes of the same user out of this one.

A wrapper holds credentials that no operator may see. A process that isn't dumpable can't be traced, and the
kernel hides its memory and environment in ``/proc`` from everybody but root.
"""

from __future__ import annotations

import ctypes
import os
import sys

from tracelake.domain.errors import TracelakeError

_PR_SET_DUMPABLE = 4


def make_undumpable() -> None:
    """Call it before the first secret is read."""
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise TracelakeError("Unprotected", f"can't hide this process: {os.strerror(ctypes.get_errno())}")
