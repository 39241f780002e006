"""What a query's process takes away from itself, inside the sandbox or without one. Nothing gives it back.

``stay_alone`` before the process sees any SQL: it can't start a program or another process, signal one, make a
socket or change a file's owner and mode, and it writes nowhere but to its own folder, also not to a file that it
was handed for reading (``/proc/self/fd`` could be opened anew, when sandbox and service share a user).
``read_only_these`` before it runs the SQL, where there is no sandbox that hides everything else: of all files it
opens those it was handed, and the interpreter's own. Both hold for the calling thread and for threads it starts
from then on, so they come before the engine has any.

File rules are Landlock's (Linux 5.13 and later); ``landlock_version`` is 0 where the kernel has none.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterable

from tracelake.worker.sandbox import seccomp

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_OTHER_MAKE = (1 << 6) | (1 << 9) | (1 << 10) | (1 << 11) | (1 << 12)
_REFER, _TRUNCATE, _DEVICE_IOCTL = 1 << 13, 1 << 14, 1 << 15
_SINCE = {2: _REFER, 3: _TRUNCATE, 5: _DEVICE_IOCTL}
_IN_OWN_FOLDER = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/dev/urandom",
    "/dev/null",
    "/proc/self",
    "/sys/fs/cgroup",
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def landlock_version() -> int:
    return max(
        0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))
    )


def die_with_parent(parent: int) -> None:
    """``parent``: as it was when we were started; it may be gone by now."""
    _prctl(_PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(0)


def limit_memory(data_bytes: int, file_bytes: int) -> None:
    """Of this process. An engine that is refused memory says so, where a cgroup would kill it or slow it down."""
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def be_unreadable() -> None:
    """Another process of our own user can't look into our memory and descriptors."""
    _prctl(_PR_SET_DUMPABLE, 0)


def stay_alone(own_folder: str | None) -> None:
    """``own_folder``: where the engine may spill."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if landlock_version():
        handled = _since(_EXECUTE | _IN_OWN_FOLDER | _OTHER_MAKE | _REFER | _DEVICE_IOCTL)
        with _Ruleset(handled) as rules:
            if own_folder is not None:
                rules.allow_path(own_folder, _since(_IN_OWN_FOLDER))
            rules.allow_path("/dev/null", _since(_WRITE_FILE))
    program = seccomp.build_filter(seccomp.machine(), alone=True)
    argument = _FilterProgram(len(program) // 8, program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(argument))


def read_only_these(descriptors: Iterable[int], folders: Iterable[str]) -> None:
    """``folders``: what the interpreter may still load, and the engine's own folder."""
    if not landlock_version():
        return
    with _Ruleset(_READ_FILE) as rules:
        for folder in (*_SYSTEM, *folders):
            rules.allow_path(folder, _READ_FILE)
        for descriptor in descriptors:
            rules.allow(descriptor, _READ_FILE)


def _since(rights: int) -> int:
    """Those of the rights that this kernel knows."""
    version = landlock_version()
    return rights & ~sum(right for since, right in _SINCE.items() if version < since)


class _Ruleset:
    """In force from the end of the ``with``."""

    def __init__(self, handled: int) -> None:
        attributes = struct.pack("=Q", handled)
        self._descriptor = _call(
            _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
        )

    def __enter__(self) -> _Ruleset:
        return self

    def allow_path(self, path: str, rights: int) -> None:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            self.allow(descriptor, rights)
        finally:
            os.close(descriptor)

    def allow(self, descriptor: int, rights: int) -> None:
        rule = struct.pack("=Qi", rights, descriptor)
        _call(
            _ADD_RULE, ctypes.c_int(self._descriptor), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)
        )

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                _call(_RESTRICT_SELF, ctypes.c_int(self._descriptor), ctypes.c_uint32(0))
        finally:
            os.close(self._descriptor)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _prctl(option: int, *arguments: object) -> None:
    given = [*arguments, 0, 0, 0, 0][:4]
    if _libc.prctl(option, *given) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
