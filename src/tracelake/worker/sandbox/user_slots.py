"""A user for each sandbox of a worker that is root.

Sandboxes share neither a user with each other nor with anything else of the machine, so that signals, quotas and
file permissions keep them apart even where a namespace would not. A number is held by a file lock: it is free
again when the worker ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import tempfile
from functools import cache
from pathlib import Path

from tracelake.domain.errors import Unavailable

FIRST_UID = 60_000
_COUNT = 1000


class UserSlot:
    """A user's number that is ours until ``release``."""

    def __init__(self, uid: int, descriptor: int) -> None:
        self.uid = uid
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __repr__(self) -> str:
        return f"UserSlot({self.uid})"


def take_slot() -> UserSlot:
    folder = _folder()
    for uid in range(FIRST_UID, FIRST_UID + _COUNT):
        if _is_known(uid):
            continue
        descriptor = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return UserSlot(uid, descriptor)
    raise Unavailable("SandboxesTaken", f"all {_COUNT} users for sandboxes are taken")


def _folder() -> Path:
    standing = Path("/run") if Path("/run").is_dir() else Path(tempfile.gettempdir())
    folder = standing / "tracelake-sandbox-users"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise Unavailable("SandboxUnavailable", f"{folder} is not ours; remove it")
    return folder


@cache
def _is_known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
