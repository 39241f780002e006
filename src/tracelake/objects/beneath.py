"""Opens files and folders beneath a held folder, relative to its descriptor and never through a link.

A name that was checked and is then opened by name can mean another file by then: an operator that may write in
one of the folders on the way swaps it for a link in between. So nothing here looks first: the kernel resolves the
whole path in one call (``openat2`` with ``RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS``), or, where it can't, we go
from descriptor to descriptor and follow no link. The opened descriptor is checked, and the same descriptor is
used.

    folder = HeldFolder(Path("/srv/objects"))
    descriptor = open_file(folder.descriptor(), "dataset/a/rows.parquet")

Paths are relative, with ``/`` between names; ``""`` is the folder itself. A path that leads through a link, or
out of the folder, is ``LeadsElsewhere``; anything but a plain file is ``NotAFile``. Both are ``OSError``, as are
errors of the disk.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

from tracelake import kernel

_BENEATH_WITHOUT_LINKS = kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_NO_MAGICLINKS
_TRIES = 16
_LEASE_SECONDS = 2.0
_LOOK_SECONDS = 0.02
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Doesn't wait for a pipe's other end, and doesn't acquire a controlling terminal.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class LeadsElsewhere(OSError):
    """The path leads through a symbolic link, or out of the folder."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "reached through a symbolic link", path)


class NotAFile(OSError):
    """A folder, a pipe, a socket, a device, or a file with further names elsewhere."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a plain file", path)


class HeldFolder:
    """A folder of the installation, held open. If it was removed or replaced meanwhile (by a disk that was mounted
    there), it is opened again by its name, as long as no link is on the way."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._held = _open_root(self.path)
        weakref.finalize(self, os.close, self._held)

    def descriptor(self) -> int:
        """Still belongs to this object: don't close it. ``FileNotFoundError`` when the folder is gone."""
        if not os.path.samestat(os.lstat(self.path), os.fstat(self._held)):
            found = _open_root(self.path)
            # Other threads may be using the old number right now: it stays open and refers to the new folder.
            os.dup2(found, self._held, inheritable=False)
            os.close(found)
        return self._held


def open_beneath(root: int, path: str, flags: int, mode: int = 0) -> int:
    """A descriptor, without a link anywhere on the way. It may be of any kind of file: check it by ``fstat``."""
    if path == "":
        return os.open(".", flags | os.O_CLOEXEC, dir_fd=root)
    _names(path)
    if _kernel_resolves():
        for _ in range(_TRIES):
            try:
                return _openat2(root, path, flags | os.O_CLOEXEC, mode)
            except OSError as error:
                # ELOOP is a link on the way, EXDEV a way out of the folder.
                if error.errno in (errno.ELOOP, errno.EXDEV):
                    raise LeadsElsewhere(path) from None
                # EAGAIN: a rename disturbed the kernel's check, or a lease on the file is being broken.
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    raise
    return _open_name_by_name(root, path, flags | os.O_CLOEXEC, mode)


def open_file(root: int, path: str, *, only_name: bool = False) -> int:
    """A plain file for reading; never waits for a pipe's other end, and at most a moment for the holder of a
    lease on the file. With ``only_name``, a file that has no other name: it isn't a hard link to a file that its
    writer can't read."""
    try:
        descriptor = _open_patiently(root, path)
    except OSError as error:
        # The kernel opens no socket, and no device without a driver.
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise NotAFile(path) from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or (only_name and found.st_nlink != 1):
        os.close(descriptor)
        raise NotAFile(path)
    return descriptor


def _open_patiently(root: int, path: str) -> int:
    until = time.monotonic() + _LEASE_SECONDS
    while True:
        try:
            return open_beneath(root, path, _FILE)
        except BlockingIOError:
            # The kernel has signalled the holder of the lease; the open succeeds once the holder releases it.
            if time.monotonic() > until or not stat.S_ISREG(stat_beneath(root, path).st_mode):
                raise
        time.sleep(_LOOK_SECONDS)


def open_folder(root: int, path: str) -> int:
    """For listing, and for creating, renaming and removing in it by ``dir_fd``."""
    return open_beneath(root, path, _FOLDER)


def stat_beneath(root: int, path: str) -> os.stat_result:
    """The file's status, without opening its content."""
    descriptor = open_beneath(root, path, os.O_PATH)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def make_folder(root: int, path: str, mode: int = 0o755, *, whatever_umask: bool = False) -> int:
    """An open descriptor of the folder, which is made with all missing folders on the way."""
    at = open_folder(root, "")
    try:
        for name in _names(path):
            made = False
            # Another process may make the same folder now; it is opened without following a link in any case.
            with suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=at)
                made = True
            below = open_folder(at, name)
            os.close(at)
            at = below
            # mkdir subtracts the umask; a folder that was there keeps its mode.
            if made and whatever_umask:
                os.fchmod(at, mode)
    except BaseException:
        os.close(at)
        raise
    return at


def split(path: str) -> tuple[str, str]:
    """The folder's path and the last name."""
    folder, _, name = path.rpartition("/")
    return folder, name


def _names(path: str) -> list[str]:
    """The path's segments; refuses those that could lead to another place."""
    names = path.split("/") if path else []
    if "\0" in path or any(name in ("", ".", "..") for name in names):
        raise LeadsElsewhere(path)
    return names


def _open_name_by_name(root: int, path: str, flags: int, mode: int) -> int:
    *folders, last = path.split("/")
    at = os.dup(root)
    try:
        for name in folders:
            # O_PATH needs the right to pass through a folder, not the right to list it.
            below = _open_unfollowed(at, name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, path)
            os.close(at)
            at = below
        return _open_unfollowed(at, last, flags, mode, path)
    finally:
        os.close(at)


def _open_unfollowed(at: int, name: str, flags: int, mode: int, path: str) -> int:
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=at)
    except OSError as error:
        # With O_DIRECTORY the kernel reports a link as ENOTDIR.
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(at, name)):
            raise LeadsElsewhere(path) from None
        raise
    # Only O_PATH opens a link itself.
    if flags & os.O_PATH and stat.S_ISLNK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LeadsElsewhere(path)
    return descriptor


def _is_link(at: int, name: str) -> bool:
    """Only distinguishes two errors; nothing was opened."""
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
    return False


def _open_root(path: Path) -> int:
    """By its name, which is the installation's; still, no part of it may have become a link."""
    beginning = os.open("/", _FOLDER)
    try:
        return open_folder(beginning, str(path).strip("/"))
    finally:
        os.close(beginning)


def _openat2(root: int, path: str, flags: int, mode: int) -> int:
    return kernel.openat2(root, path, flags, mode, _BENEATH_WITHOUT_LINKS)


@cache
def _kernel_resolves() -> bool:
    """Linux 5.6 and later, unless a filter for system calls is older than the call."""
    beginning = os.open("/", _FOLDER)
    try:
        os.close(_openat2(beginning, ".", os.O_PATH | os.O_CLOEXEC, 0))
    except OSError:
        return False
    finally:
        os.close(beginning)
    return True
