"""The system call filter says what it promises, on both architectures. A small interpreter plays the kernel."""

from __future__ import annotations

import errno
import fcntl
import socket
import stat
import struct

import pytest

from tracelake.sandbox import seccomp
from tracelake.sandbox.seccomp import build_filter, build_operator_filter

ARCHITECTURES = {seccomp.X86_64: 0xC000003E, seccomp.AARCH64: 0xC00000B7}
KILL, ALLOW = 0x80000000, 0x7FFF0000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
READ = {seccomp.X86_64: 0, seccomp.AARCH64: 63}

both = pytest.mark.parametrize("column", [seccomp.X86_64, seccomp.AARCH64], ids=["x86_64", "aarch64"])


def verdict(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *([0] * (6 - len(arguments))))
    code = list(struct.iter_unpack("=HBBI", program))
    position, register = 0, 0
    while True:
        operation, when_true, when_false, value = code[position]
        position += 1
        match operation:
            case 0x20:
                (register,) = struct.unpack_from("=I", data, value)
            case 0x15:
                position += when_true if register == value else when_false
            case 0x35:
                position += when_true if register >= value else when_false
            case 0x45:
                position += when_true if register & value else when_false
            case 0x54:
                register &= value
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"unknown operation {operation:#x}")


def ask(column: int, number: int | None, *arguments: int, counted: bool = True) -> int:
    assert number is not None
    program = build_filter(column, memory_is_counted=counted)
    return verdict(program, number, *arguments, architecture=ARCHITECTURES[column])


@both
def test_ordinary_calls_are_allowed(column: int) -> None:
    assert ask(column, READ[column]) == ALLOW


@both
@pytest.mark.parametrize("name", seccomp.REFUSED)
def test_what_is_on_the_list_is_refused(column: int, name: str) -> None:
    number = seccomp.REFUSED[name][column]
    assert number is None or ask(column, number) == EPERM


@both
def test_no_two_calls_have_one_number(column: int) -> None:
    numbers = [n[column] for n in seccomp.REFUSED.values() if n[column] is not None]
    assert len(numbers) == len(set(numbers))


@both
def test_another_architecture_is_killed(column: int) -> None:
    program = build_filter(column)
    for architecture in (0x40000003, 0x40000028, ARCHITECTURES[1 - column]):
        assert verdict(program, READ[column], architecture=architecture) == KILL


def test_x32_is_killed() -> None:
    assert ask(seccomp.X86_64, 0x40000000 | 39) == KILL


@both
def test_processes_and_threads_can_be_made_but_no_namespaces(column: int) -> None:
    assert ask(column, seccomp.CLONE[column], 0x003D0F00) == ALLOW
    assert ask(column, seccomp.CLONE[column], 17) == ALLOW
    for flag in (0x80, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(column, seccomp.CLONE[column], flag | 17) == EPERM


@both
def test_clone3_and_calls_of_the_future_do_not_exist(column: int) -> None:
    assert ask(column, seccomp.CLONE3[column]) == ENOSYS
    assert ask(column, seccomp.NEWEST_KNOWN) == ALLOW
    assert ask(column, seccomp.NEWEST_KNOWN + 1) == ENOSYS


@both
def test_sockets_are_unix_or_tcp(column: int) -> None:
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    allowed = [
        (socket.AF_UNIX, socket.SOCK_DGRAM, 0),
        (socket.AF_UNIX, socket.SOCK_STREAM | flags, 0),
        (socket.AF_INET, socket.SOCK_STREAM | flags, socket.IPPROTO_TCP),
        (socket.AF_INET6, socket.SOCK_STREAM, 0),
    ]
    refused = [
        (socket.AF_INET, socket.SOCK_RAW, 1),
        (socket.AF_INET, socket.SOCK_DGRAM, 0),
        (socket.AF_INET, socket.SOCK_STREAM, 262),
        (socket.AF_INET6, socket.SOCK_RAW, 58),
        (socket.AF_NETLINK, socket.SOCK_RAW, 0),
        (socket.AF_PACKET, socket.SOCK_RAW, 0),
        (40, socket.SOCK_STREAM, 0),
        (38, socket.SOCK_SEQPACKET, 0),
    ]
    assert {ask(column, seccomp.SOCKET[column], *call) for call in allowed} == {ALLOW}
    assert {ask(column, seccomp.SOCKET[column], *call) for call in refused} == {EPERM}


@both
def test_the_upper_half_of_an_argument_hides_nothing(column: int) -> None:
    assert ask(column, seccomp.SOCKET[column], (1 << 32) | socket.AF_NETLINK, 3, 0) == EPERM
    assert ask(column, seccomp.IOCTL[column], 0, (1 << 32) | 0x5412) == EPERM


@both
def test_nothing_is_typed_into_a_terminal(column: int) -> None:
    assert ask(column, seccomp.IOCTL[column], 0, 0x5412) == EPERM
    assert ask(column, seccomp.IOCTL[column], 0, 0x5413) == ALLOW


@both
def test_pipes_can_be_made_and_devices_not(column: int) -> None:
    number = seccomp.MKNODAT[column]
    assert ask(column, number, 0, 0, stat.S_IFIFO | 0o600) == ALLOW
    assert ask(column, number, 0, 0, stat.S_IFBLK | 0o600) == EPERM
    assert ask(column, number, 0, 0, stat.S_IFCHR | 0o600) == EPERM


@both
def test_memory_that_nothing_counts_is_refused_where_that_matters(column: int) -> None:
    for counted, expected in ((True, ALLOW), (False, EPERM)):
        assert ask(column, seccomp.MMAP[column], 0, 0, 3, 0x21, counted=counted) == expected
        assert ask(column, seccomp.UNCOUNTED_MEMORY["memfd_create"][column], counted=counted) == expected
    assert ask(column, seccomp.MMAP[column], 0, 0, 3, 0x22, counted=False) == ALLOW
    assert ask(column, seccomp.MMAP[column], 0, 0, 3, 0x01, counted=False) == ALLOW


@both
def test_the_filter_is_one_that_the_kernel_takes(column: int) -> None:
    program = build_filter(column, memory_is_counted=False)
    length = len(program) // 8
    assert len(program) % 8 == 0
    assert length <= 4096
    for position, (operation, when_true, when_false, _) in enumerate(struct.iter_unpack("=HBBI", program)):
        if operation in (0x15, 0x35, 0x45):
            assert position + 1 + max(when_true, when_false) < length


def operator(column: int, number: int | None, *arguments: int) -> int:
    assert number is not None
    program = build_operator_filter(column)
    return verdict(program, number, *arguments, architecture=ARCHITECTURES[column])


@both
@pytest.mark.parametrize("name", seccomp.KEYRINGS)
def test_an_operator_is_refused_keyrings(column: int, name: str) -> None:
    assert operator(column, seccomp.REFUSED[name][column]) == EPERM


@both
@pytest.mark.parametrize("command", ["F_SETLEASE", "F_NOTIFY"])
def test_neither_an_operator_nor_a_function_holds_a_file(column: int, command: str) -> None:
    number = seccomp.FCNTL[column]
    held = getattr(fcntl, command)
    # The kernel looks at the lower half alone, and so does the filter.
    for value in (held, held | 1 << 32):
        assert operator(column, number, 3, value) == EPERM
        assert ask(column, number, 3, value) == EPERM
    assert operator(column, number, 3, fcntl.F_SETLK) == ALLOW
    assert ask(column, number, 3, fcntl.F_SETLK) == ALLOW


@both
def test_everything_else_is_an_operators_to_use(column: int) -> None:
    others = [numbers for name, numbers in seccomp.REFUSED.items() if name not in seccomp.KEYRINGS]
    for number in (READ[column], seccomp.CLONE3[column], 1000, *(each[column] for each in others)):
        if number is not None:
            assert operator(column, number) == ALLOW


def test_an_operators_calls_by_another_architecture_end_it() -> None:
    i386, x32 = 0x40000003, 0x40000000
    program = build_operator_filter(seccomp.X86_64)
    assert verdict(program, 288, architecture=i386) == KILL
    assert verdict(program, x32 | 250, architecture=ARCHITECTURES[seccomp.X86_64]) == KILL
