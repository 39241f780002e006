"""Namespaces of one's own: mounts, processes and System V memory that others neither see nor share.

Root makes them directly. Anybody else makes a user namespace first, in which they stay who they are and are
powerful over nothing but it. That power is used for the mounts here and dropped before anything else is loaded.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from tracelake.domain.errors import Unavailable
from tracelake.worker.host import kernel
from tracelake.worker.host.private_view import Blank, Cover, Show, Step

_CAREFUL = kernel.MS_NOSUID | kernel.MS_NODEV
_KEPT = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
"""Flags that a mount keeps; a user may not take them away."""


SHARED_MEMORY = Path("/dev/shm")


class NoNamespaces(Unavailable):
    def __init__(self, error: OSError) -> None:
        super().__init__("NoNamespaces", f"a private view can't be had: {error.strerror}")


def enter() -> None:
    """This process keeps its place among the others; its first child becomes the new namespace's init."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            kernel.unshare(flags)
        else:
            kernel.unshare(flags | kernel.CLONE_NEWUSER)
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{uid} {uid} 1")
            _write("/proc/self/gid_map", f"{gid} {gid} 1")
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    except OSError as error:
        raise NoNamespaces(error) from None


def enter_mounts() -> None:
    """For root: mounts of one's own and nothing more."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    except OSError as error:
        raise NoNamespaces(error) from None


def enter_own() -> None:
    """For one process that the host starts: its mounts and System V memory. Its processes were made by its fork."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
    except OSError as error:
        raise NoNamespaces(error) from None


def allow_no_more_users() -> bool:
    """No user namespace within this one: a copy of the mounts that its maker is powerful over would outlast what is
    taken away here. False where the kernel doesn't let us say so."""
    try:
        _write("/proc/sys/user/max_user_namespaces", "0")
    except OSError:
        return False
    return True


def forbid_writing() -> None:
    """Every mount becomes read-only. What is mounted afterwards isn't."""
    try:
        try:
            kernel.mount_read_only_below("/")
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
            _forbid_writing_one_by_one()
    except OSError as error:
        raise NoNamespaces(error) from None


def arrange(steps: Sequence[Step], scratch: Path | None = None) -> None:
    """What will be shown is opened before the first cover hides it. ``scratch`` takes the place of scratch folders
    on a disk; without it they are in memory."""
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
        # Only now, since showing something makes the folders that lead to it.
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
    """For the new namespace's init: ``/proc`` shows its own processes, and nobody else's."""
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
    """Reading or writing as ``source`` does."""
    kernel.mount(f"/proc/self/fd/{source}", target, None, kernel.MS_BIND)


def remount(target: str, *, read_only: bool) -> None:
    """``EBUSY`` when something is open for writing through this very mount, also by a mapping of its file."""
    kept = os.statvfs(target).f_flag & _KEPT
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kept | (kernel.MS_RDONLY if read_only else 0)
    kernel.mount("none", target, None, flags)


def _forbid_writing_one_by_one() -> None:
    with open("/proc/self/mountinfo", "rb") as file:
        targets = [line.split()[4].decode("unicode_escape") for line in file]
    for target in targets:
        try:
            remount(target, read_only=True)
        except OSError as error:
            # Covered by another mount, or closed to us: then it is to operators as well.
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.EINVAL):
                raise


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
