"""The filter of system calls that operators and Spark live under; what it refuses is said in ``sandbox.seccomp``.

Set once the process has become who it will be, and for good: also for every program that it executes. A machine for
which there is no filter, or whose kernel has none, is told by ``verify``, which looks whether it is there.
"""

from __future__ import annotations

import ctypes
import errno
import os

from tracelake.domain.errors import Unavailable
from tracelake.worker.sandbox import seccomp

_SECCOMP = (317, 277)  # x86_64, aarch64
_SET_FILTER = 1
_AS_FAST_AS_BEFORE = 1 << 2
"""SECCOMP_FILTER_FLAG_SPEC_ALLOW: kernels before 5.16 would slow a filtered process down otherwise."""
_NOT_HERE = (errno.EINVAL, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_calls() -> None:
    """For a process that can gain no privileges and has one thread."""
    try:
        column = seccomp.machine()
    except Unavailable:
        return
    program = seccomp.build_operator_filter(column)
    argument = _FilterProgram(len(program) // 8, program)
    for flags in (_AS_FAST_AS_BEFORE, 0):
        wish = (ctypes.c_long(_SET_FILTER), ctypes.c_long(flags), ctypes.byref(argument))
        if _libc.syscall(_SECCOMP[column], *wish) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NOT_HERE:
            raise OSError(number, f"seccomp: {os.strerror(number)}")
