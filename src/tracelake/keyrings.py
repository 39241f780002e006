"""The kernel's keyrings, which a process inherits from whoever started it and which no namespace keeps apart.

A session's keyring is shared by all that were started in it, whatever user they have become since; a user's keyring
is found by everything that ever runs as that uid. Root's may hold what opens file systems and tickets. So a process
that must not share them leaves the one and empties the other.

Where the kernel has no keyrings, or its caller may not use them (containers often may not), there is nothing to do.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

from tracelake import accounts

_KEYCTL = {"x86_64": 250, "amd64": 250, "aarch64": 219, "arm64": 219}
_GET_ID, _JOIN_SESSION, _CLEAR, _GET_PERSISTENT = 0, 1, 7, 22
_PROCESS, _SESSION, _USER, _USER_SESSION = -2, -3, -4, -5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def leave(uid: int | None) -> None:
    """After the identity was taken. ``uid`` is whose keyrings are emptied, if it is one of ours: it had another
    process before. Nobody's whom the machine knows, who may keep something there."""
    prepared(uid)()


def prepared(uid: int | None) -> Callable[[], None]:
    """The same as a function that does nothing but system calls, for between fork and exec."""
    number = _KEYCTL.get(platform.machine().lower())
    call, ours = _libc.syscall, uid is not None and accounts.is_ours(uid)
    join = (ctypes.c_long(_JOIN_SESSION), None, None, None)
    clears = [(ctypes.c_long(_CLEAR), ctypes.c_long(which), None, None) for which in (_USER, _USER_SESSION)]
    persistent = (ctypes.c_long(_GET_PERSISTENT), ctypes.c_long(-1), ctypes.c_long(_PROCESS), None)

    def in_child() -> None:
        if number is None:
            return
        call(number, *join)
        if ours:
            for clear in clears:
                call(number, *clear)
            found = call(number, *persistent)
            if found > 0:
                call(number, ctypes.c_long(_CLEAR), ctypes.c_long(found), None, None)

    return in_child


def can_be_used() -> bool:
    """By this process, as it is."""
    number = _KEYCTL.get(platform.machine().lower())
    if number is None:
        return False
    wish = (ctypes.c_long(_GET_ID), ctypes.c_long(_SESSION), None, None)
    return int(_libc.syscall(number, *wish)) >= 0
