"""The system calls of a sandbox: a filter in the kernel's classic BPF, assembled here.

Promises: a program for another architecture than ours (32 bit, x32) is killed at its first call; what the list of
``syscalls`` names fails with EPERM, whatever the capabilities; new namespaces can't be made by ``clone``, and
``clone3``, whose flags a filter can't see, looks as if the kernel were too old for it; sockets are Unix or TCP, so
neither raw, packet, netlink nor vsock; nothing can be typed into a terminal (TIOCSTI); no lease can be had on a
file, for which others would have to wait; calls that are newer than this list don't exist. Everything else is
allowed: isolation is the namespaces' task, and this takes away what could break them.

Operators and Spark get a filter of their own, which takes away what crosses accounts and namespaces, and nothing
else: keyrings, and leases and notices on files.
"""

from __future__ import annotations

import errno
import platform
import socket
import stat
import struct
from collections.abc import Iterator

from tracelake.domain.errors import Unavailable
from tracelake.worker.sandbox import syscalls

_LOAD_WORD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _AND, _RETURN = (
    0x20,
    0x15,
    0x35,
    0x45,
    0x54,
    0x06,
)

_KILL_PROCESS = 0x80000000
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000
_AUDIT_ARCHITECTURES = {syscalls.X86_64: 0xC000003E, syscalls.AARCH64: 0xC00000B7}
_MACHINES = {"x86_64": syscalls.X86_64, "amd64": syscalls.X86_64, "aarch64": syscalls.AARCH64}
_MACHINES["arm64"] = syscalls.AARCH64

# NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NAMESPACE_FLAGS = (
    0x80 | 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
_THREAD_FLAG = 0x10000
_TERMINAL_INPUT = (0x5412, 0x541C, 0x541D)  # TIOCSTI, TIOCLINUX, TIOCCONS
_SHARED_ANONYMOUS = 0x21
_SOCKET_TYPE_MASK = 0xF
_HOLDS_ON_FILES = (1024, 1026, 1040)  # F_SETLEASE, F_NOTIFY, F_SETDELEG

Instruction = tuple[int, int, int, int]
SyscallNumbers = tuple[int | None, int | None]


def machine() -> int:
    """Which column of the tables is ours."""
    name = platform.machine().lower()
    if name not in _MACHINES:
        raise Unavailable("SandboxUnavailable", f"no system call filter is known for the machine {name!r}")
    return _MACHINES[name]


def build_filter(column: int, *, memory_is_counted: bool = True, alone: bool = False) -> bytes:
    """The program for ``bwrap --seccomp``: an array of the kernel's ``struct sock_filter``.

    ``alone``: also for a process that needs nothing but its threads and the descriptors that it has. It can't
    start another process or program, signal one, make a socket, or change who may use a file.
    """
    code = _own_architecture(column)
    code += [(_JUMP_GREATER_EQUAL, 0, 1, syscalls.NEWEST_KNOWN + 1), _fail(errno.ENOSYS)]
    code += _when(syscalls.CLONE3[column], [_fail(errno.ENOSYS)])
    for numbers in (*syscalls.REFUSED.values(), *(syscalls.NOT_ALONE.values() if alone else ())):
        code += _when(numbers[column], [_fail(errno.EPERM)])
    if alone:
        code += _when(syscalls.CLONE[column], _require_bit(0, _THREAD_FLAG))
        code += _when(syscalls.PRLIMIT[column], _allow_only(0, (0,)))
    for number, body in _conditional(column, memory_is_counted):
        code += _when(number, body)
    return _assembled(code)


def build_operator_filter(column: int) -> bytes:
    """Where calls of another architecture would be another way to the same, they end the process."""
    code = _own_architecture(column)
    for name in syscalls.KEYRINGS:
        code += _when(syscalls.REFUSED[name][column], [_fail(errno.EPERM)])
    code += _when(syscalls.FCNTL[column], _refuse_equal(1, 0xFFFFFFFF, _HOLDS_ON_FILES))
    return _assembled(code)


def _own_architecture(column: int) -> list[Instruction]:
    """Ends with the call's number loaded."""
    code: list[Instruction] = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[column]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD_WORD, 0, 0, _NUMBER),
    ]
    if column == syscalls.X86_64:
        code += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL_PROCESS)]
    return code


def _assembled(code: list[Instruction]) -> bytes:
    allowed: Instruction = (_RETURN, 0, 0, _ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in (*code, allowed))


def _conditional(column: int, memory_is_counted: bool) -> Iterator[tuple[int | None, list[Instruction]]]:
    yield syscalls.CLONE[column], _refuse_any_bit(0, _NAMESPACE_FLAGS)
    yield syscalls.SOCKET[column], _sockets()
    yield syscalls.SOCKETPAIR[column], _allow_only(0, (socket.AF_UNIX,))
    yield syscalls.IOCTL[column], _refuse_equal(1, 0xFFFFFFFF, _TERMINAL_INPUT)
    yield syscalls.FCNTL[column], _refuse_equal(1, 0xFFFFFFFF, _HOLDS_ON_FILES)
    devices = (stat.S_IFCHR, stat.S_IFBLK)
    yield syscalls.MKNOD[column], _refuse_equal(1, 0o170000, devices)
    yield syscalls.MKNODAT[column], _refuse_equal(2, 0o170000, devices)
    if not memory_is_counted:
        yield syscalls.MMAP[column], _refuse_equal(3, _SHARED_ANONYMOUS, (_SHARED_ANONYMOUS,))
        for numbers in syscalls.UNCOUNTED_MEMORY.values():
            yield numbers[column], [_fail(errno.EPERM)]


def _fail(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _when(number: int | None, body: list[Instruction]) -> list[Instruction]:
    """``body`` ends in a return on every path, so the call's number stays loaded for what follows."""
    return [] if number is None else [(_JUMP_EQUAL, 0, len(body), number), *body]


def _argument(index: int) -> Instruction:
    """Its lower half on a little-endian machine; the kernel itself takes each of these for 32 bits."""
    return (_LOAD_WORD, 0, 0, _ARGUMENTS + 8 * index)


def _refuse_any_bit(index: int, bits: int) -> list[Instruction]:
    return [_argument(index), (_JUMP_ANY_BIT, 0, 1, bits), _fail(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]


def _require_bit(index: int, bit: int) -> list[Instruction]:
    return [_argument(index), (_JUMP_ANY_BIT, 1, 0, bit), _fail(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]


def _refuse_equal(index: int, mask: int, values: tuple[int, ...]) -> list[Instruction]:
    body: list[Instruction] = [_argument(index), (_AND, 0, 0, mask)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), _fail(errno.EPERM)]
    return [*body, (_RETURN, 0, 0, _ALLOW)]


def _allow_only(index: int, values: tuple[int, ...]) -> list[Instruction]:
    body = [_argument(index)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*body, _fail(errno.EPERM)]


def _sockets() -> list[Instruction]:
    stream = [
        _argument(1),
        (_AND, 0, 0, _SOCKET_TYPE_MASK),
        (_JUMP_EQUAL, 1, 0, socket.SOCK_STREAM),
        _fail(errno.EPERM),
        *_allow_only(2, (0, socket.IPPROTO_TCP)),
    ]
    return [
        _argument(0),
        (_JUMP_EQUAL, 0, 1, socket.AF_UNIX),
        (_RETURN, 0, 0, _ALLOW),
        (_JUMP_EQUAL, 1, 0, socket.AF_INET),
        (_JUMP_EQUAL, 0, len(stream), socket.AF_INET6),
        *stream,
        _fail(errno.EPERM),
    ]
