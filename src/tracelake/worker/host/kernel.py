"""The system calls that Python has no name for: namespaces, mounts, capabilities, process attributes.

Each raises ``OSError`` with the call's name, so that a refusal says which right was missing.
"""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_SETATTR = 442
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SETPCAP = 8
_MAX_CAPABILITY = 64

_libc = ctypes.CDLL(None, use_errno=True)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def enter_namespace(descriptor: int, kind: int) -> None:
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        None if data is None else data.encode(),
    )
    _check(result, f"mount on {target}")


def unmount(target: str) -> None:
    """Out of everybody's sight at once; who has something open there keeps it."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount of {target}")


def mount_read_only_below(target: str) -> None:
    """This mount and all that are mounted within it; since Linux 5.12."""
    attributes = _MountAttributes(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(result, f"mount_setattr of {target}")


def die_with_parent() -> None:
    """The kernel forgets it when the identity changes, so this comes after."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def forbid_inspection() -> None:
    """No other process of the same user can trace this one or read its memory and environment."""
    _prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Descendants whose parent ends become this process's children, not init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_bounding_set() -> None:
    """What isn't in it can't be gained again, not even from a program with capabilities of its own.

    Who may not drop it had no power to begin with, and ``gain_no_privileges`` keeps it so.
    """
    last = _CAP_SETPCAP
    for capability in (*(each for each in range(_MAX_CAPABILITY) if each != last), last):
        if _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_capabilities() -> None:
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    nothing = (_CapabilityData * 2)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")


def gain_no_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
