"""Files that hold secrets: read only if they are their owner's alone, and watched cheaply for changes.

Reading refuses a file that other users could have read or written: a leaked secret protects nothing, and an error
at start shows it. ``durable_files`` writes them.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from tracelake.domain.errors import TracelakeError

SETTLE_NS = 2_000_000_000
"""Two changes within one tick of the file system's clock look like one: recent files are read again."""


def ensure_private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise TracelakeError("SecretFolderInvalid", f"{folder} is not a folder")
    _refuse_exposed(found, folder, "700")


def read_private(path: Path) -> bytes:
    """The file's bytes, with mode and owner checked on the open file rather than on its name."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise TracelakeError("SecretFileInvalid", f"{path} is not a regular file")
        _refuse_exposed(found, path, "600")
        return file.read()


def _open_without_waiting(path: str, flags: int) -> int:
    """Otherwise a pipe in the file's place would block the process for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse_exposed(found: os.stat_result, path: Path, wanted: str) -> None:
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise TracelakeError(
            "SecretExposed", f"{path} has mode {mode:03o}, open to other users; run: chmod {wanted} {path}"
        )
    # Root could read and change the file anyway.
    if found.st_uid not in (os.geteuid(), 0):
        raise TracelakeError("SecretExposed", f"{path} belongs to another user (uid {found.st_uid})")


class ChangeMark:
    """Whether a file or folder may have changed since the last question, for the price of one stat."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._unsettled = True

    def changed(self) -> bool:
        """True also for changes moments ago. A vanished path raises FileNotFoundError."""
        found = os.stat(self._path)
        # A program can set mtime to an old value, but not ctime.
        mark = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        changed = self._unsettled or mark != self._seen
        self._seen = mark
        self._unsettled = time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < SETTLE_NS
        return changed
