"""Private namespaces: mounts, processes and System V memory that other processes neither see nor share.

Root makes them directly. Other users make a user namespace first, in which they keep their uid and have power
over that namespace alone. That power is used for the mounts here and dropped before any other code is loaded.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from tracelake import kernel
from tracelake.domain.errors import Unavailable
from tracelake.worker.host.private_view import Blank, Cover, Show, Step

_CAREFUL = kernel.MS_NOSUID | kernel.MS_NODEV
_KEPT = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
"""Flags that a mount keeps; a user may not remove them."""


SHARED_MEMORY = Path("/dev/shm")


class NoNamespaces(Unavailable):
    def __init__(self, error: OSError) -> None:
        super().__init__("NoNamespaces", f"a private view can't be had: {error.strerror}")


def enter() -> None:
    """This process stays in its process namespace; its first child becomes the new one's init."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            kernel.unshare(flags)
        else:
            kernel.unshare(flags | kernel.CLONE_NEWUSER)
            # First: the kernel demands it before a user without privileges may map groups.
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{uid} {uid} 1")
            _write("/proc/self/gid_map", f"{gid} {gid} 1")
        # Private, so that no mount below propagates to the machine.
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    except OSError as error:
        raise NoNamespaces(error) from None


def enter_own() -> None:
    """Enter private mounts and System V memory, for one process that the host starts; its fork made the process
    namespace."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
    except OSError as error:
        raise NoNamespaces(error) from None


def allow_no_more_users() -> bool:
    """Forbid user namespaces within this one: with a copy of the mounts its maker could keep what is withdrawn
    here. False where the kernel has no such limit."""
    try:
        _write("/proc/sys/user/max_user_namespaces", "0")
    except OSError:
        return False
    return True


def forbid_writing() -> None:
    """Make every mount read-only; later mounts aren't affected."""
    try:
        try:
            kernel.mount_read_only_below("/")
        except OSError as error:
            # Kernels before 5.12 don't have the call.
            if error.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
            _forbid_writing_one_by_one()
    except OSError as error:
        raise NoNamespaces(error) from None


def arrange(steps: Sequence[Step], scratch: Path | None = None) -> None:
    """Carry out the steps. Paths to show are opened before the first cover hides them. ``scratch`` holds the
    scratch folders on a disk; without it they are in memory."""
    opened: dict[Path, int] = {}
    try:
        for path in [step.path for step in steps if isinstance(step, Show)] + ([scratch] if scratch else []):
            opened[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        for step in steps:
            if isinstance(step, Cover) and step.scratch and scratch and step.path != SHARED_MEMORY:
                bind(opened[scratch], str(step.path))
                remount(str(step.path), read_only=False)
            else:
                _take(step, opened)
        # Last, since showing a path makes the folders that lead to it.
        for step in steps:
            if isinstance(step, Cover) and not step.scratch:
                flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _CAREFUL
                kernel.mount("none", str(step.path), None, flags)
    except OSError as error:
        raise NoNamespaces(error) from None
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def mount_proc() -> None:
    """Mount ``/proc`` for the new namespace's init, so that it shows only the namespace's own processes."""
    try:
        kernel.mount("proc", "/proc", "proc", _CAREFUL | kernel.MS_NOEXEC)
    except OSError as error:
        raise NoNamespaces(error) from None


def _take(step: Step, opened: dict[Path, int]) -> None:
    match step:
        case Cover(path, scratch):
            kernel.mount(
                "tmpfs", str(path), "tmpfs", _CAREFUL, "mode=1777" if scratch else "mode=755,size=1m"
            )
        case Blank(path):
            kernel.mount("/dev/null", str(path), None, kernel.MS_BIND)
        case Show(path, writable):
            source = f"/proc/self/fd/{opened[path]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.isdir(source):
                path.mkdir(exist_ok=True)
            else:
                path.touch()
            kernel.mount(source, str(path), None, kernel.MS_BIND | kernel.MS_REC)
            if writable:
                remount(str(path), read_only=False)


def bind(source: int, target: str) -> None:
    """Bind a descriptor's folder to a path, with the same access."""
    kernel.mount(f"/proc/self/fd/{source}", target, None, kernel.MS_BIND)


def remount(target: str, *, read_only: bool) -> None:
    """Fails with ``EBUSY`` while a file is open or mapped for writing through this very mount."""
    kept = os.statvfs(target).f_flag & _KEPT
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kept | (kernel.MS_RDONLY if read_only else 0)
    kernel.mount("none", target, None, flags)


def _forbid_writing_one_by_one() -> None:
    with open("/proc/self/mountinfo", "rb") as file:
        # The kernel writes spaces and the like as octal escapes.
        targets = [line.split()[4].decode("unicode_escape") for line in file]
    for target in targets:
        try:
            remount(target, read_only=True)
        except OSError as error:
            # Covered by another mount, or closed to us: then operators can't reach it either.
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.EINVAL):
                raise


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
