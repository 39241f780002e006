"""Files and folders beneath a held folder: opened relative to its descriptor, never through a link.

A name that was checked and is then opened by name can mean another file by then: whoever may write in one of
the folders on the way swaps it for a link in between. So nothing here looks first: the kernel resolves the whole
path in one call (``openat2`` with ``RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS``), or, where it can't, we go from
descriptor to descriptor and follow no link. What was opened is what is judged, and what is used.

    folder = HeldFolder(Path("/srv/objects"))
    descriptor = open_file(folder.descriptor(), "dataset/a/rows.parquet")

Paths are relative, with ``/`` between names; ``""`` is the folder itself. A path that leads through a link, or out
of the folder, is ``LeadsElsewhere``; what is there and isn't a plain file ``NotAFile``. Both are ``OSError``, as
is whatever the disk says.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

_OPENAT2 = 437  # the same number on every architecture
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_TRIES = 16
_LEASE_SECONDS = 2.0
_LOOK_SECONDS = 0.02
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Waits for no pipe's other end, and takes no terminal.
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
    """A folder whose name is ours, held open. One that was removed, or replaced while nobody looked (a disk that
    was mounted there), is found again by that name, as long as no link is on the way."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._held = _open_root(self.path)
        weakref.finalize(self, os.close, self._held)

    def descriptor(self) -> int:
        """Stays this object's own. ``FileNotFoundError`` when the folder is gone."""
        if not os.path.samestat(os.lstat(self.path), os.fstat(self._held)):
            found = _open_root(self.path)
            # Others may be using the old number right now: it keeps its place and gets a new meaning.
            os.dup2(found, self._held, inheritable=False)
            os.close(found)
        return self._held


def open_beneath(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Without a link anywhere on the way. Any kind of thing may be opened: judge it by its descriptor."""
    if path == "":
        return os.open(".", flags | os.O_CLOEXEC, dir_fd=root)
    _names(path)
    if _kernel_resolves():
        for _ in range(_TRIES):
            try:
                return _openat2(root, path, flags | os.O_CLOEXEC, mode)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EXDEV):
                    raise LeadsElsewhere(path) from None
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    raise
    return _open_name_by_name(root, path, flags | os.O_CLOEXEC, mode)


def open_file(root: int, path: str, *, only_name: bool = False) -> int:
    """A plain file for reading; waits for no pipe's other end, and a moment at most for who has a lease on the file
    and has to give it back. With ``only_name``, one that has no other name anywhere: whoever wrote it here didn't
    link it from a place that they can't read."""
    try:
        descriptor = _open_patiently(root, path)
    except OSError as error:
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
            # The kernel has told whoever has the lease; it is theirs no longer once they answer.
            if time.monotonic() > until or not stat.S_ISREG(stat_beneath(root, path).st_mode):
                raise
        time.sleep(_LOOK_SECONDS)


def open_folder(root: int, path: str) -> int:
    """For listing, and for what is made, renamed and removed in it by ``dir_fd``."""
    return open_beneath(root, path, _FOLDER)


def stat_beneath(root: int, path: str) -> os.stat_result:
    """What lies there, without opening it."""
    descriptor = open_beneath(root, path, os.O_PATH)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def make_folder(root: int, path: str, mode: int = 0o755, *, whatever_umask: bool = False) -> int:
    """The folder, with those on the way to it as far as they are missing, open."""
    at = open_folder(root, "")
    try:
        for name in _names(path):
            made = False
            with suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=at)
                made = True
            below = open_folder(at, name)
            os.close(at)
            at = below
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
    """Refuses what could mean another place than it says."""
    names = path.split("/") if path else []
    if "\0" in path or any(name in ("", ".", "..") for name in names):
        raise LeadsElsewhere(path)
    return names


def _open_name_by_name(root: int, path: str, flags: int, mode: int) -> int:
    *folders, last = path.split("/")
    at = os.dup(root)
    try:
        for name in folders:
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
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(at, name)):
            raise LeadsElsewhere(path) from None
        raise
    # Only O_PATH opens a link itself.
    if flags & os.O_PATH and stat.S_ISLNK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LeadsElsewhere(path)
    return descriptor


def _is_link(at: int, name: str) -> bool:
    """Only tells which error it is; nothing was opened."""
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


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@cache
def _syscall() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


def _openat2(root: int, path: str, flags: int, mode: int) -> int:
    how = _OpenHow(flags, mode, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
    descriptor: int = _syscall()(
        ctypes.c_long(_OPENAT2),
        ctypes.c_int(root),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return descriptor


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
