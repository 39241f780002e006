"""System call filters in the kernel's classic BPF: one for sandboxes, one for operators and Spark.

In a sandbox a program for another architecture than ours (32 bit, x32) is killed at its first call. Calls that the
tables below list fail with EPERM, whatever the capabilities. ``clone`` can't make namespaces, and ``clone3``, whose
flags a filter can't see, fails as on a kernel that doesn't have it. Sockets are Unix or TCP, so neither raw,
packet, netlink nor vsock. Nothing can be typed into a terminal (TIOCSTI). No lease can be taken on a file, for
which other processes would have to wait. Calls that are newer than the tables don't exist. Everything else is
allowed: isolation is the namespaces' task, and the filter blocks the calls that could break them.

The filter for operators and Spark only blocks what crosses accounts and namespaces: keyrings, and leases and
notices on files. It is set once the process has its final identity, and for good, also for every program that it
executes. ``worker.host.host_check`` warns about a machine that has no filter.

The tables hold the calls' numbers, ``(x86_64, aarch64)``; None where the architecture has no such call. They are
part of Linux's stable ABI.
"""

from __future__ import annotations

import errno
import platform
import socket
import stat
import struct
from collections.abc import Iterator

from tracelake import kernel
from tracelake.domain.errors import Unavailable

_KILL_PROCESS = 0x80000000
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_X32_BIT = 0x40000000
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
# Calls with a number above the newest one examined don't exist in a sandbox.
NEWEST_KNOWN = 466
CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
IOCTL = (16, 29)
FCNTL = (72, 25)
MMAP = (9, 222)
MKNOD = (133, None)
MKNODAT = (259, 33)
PRLIMIT = (302, 261)
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # into other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # namespaces and the tree of mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # parts of the kernel that are large, new or known for holes
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "memfd_secret": (447, 447),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "create_module": (174, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
}
# Keyrings belong to a user or a session and know no namespace: other processes would find what is left there.
KEYRINGS = ("add_key", "request_key", "keyctl")
# Memory that no rlimit counts; refused where there is no cgroup to count it.
UNCOUNTED_MEMORY: dict[str, tuple[int | None, int | None]] = {
    "memfd_create": (319, 279),
    "shmget": (29, 194),
}
# Calls that a process that stays alone with its threads doesn't need.
NOT_ALONE: dict[str, tuple[int | None, int | None]] = {
    # other processes and programs
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    # sockets beyond those it was given
    "socket": SOCKET,
    "socketpair": SOCKETPAIR,
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # memory of other processes, by way of the file system
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # owner and mode of files: a descriptor may refer to a file outside of the sandbox
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "link": (86, None),
    "linkat": (265, 37),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
X86_64, AARCH64 = 0, 1
_LOAD_WORD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _AND, _RETURN = (
    0x20,
    0x15,
    0x35,
    0x45,
    0x54,
    0x06,
)
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_AUDIT_ARCHITECTURES = {X86_64: 0xC000003E, AARCH64: 0xC00000B7}
_MACHINES = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}


def refuse_calls() -> None:
    """Put an operator or Spark under its filter; for a process that can gain no privileges and has one thread."""
    try:
        column = machine()
    except Unavailable:
        return
    kernel.filter_own_calls(build_operator_filter(column))


def machine() -> int:
    """The column of the tables for this machine."""
    name = platform.machine().lower()
    if name not in _MACHINES:
        raise Unavailable("SandboxUnavailable", f"no system call filter is known for the machine {name!r}")
    return _MACHINES[name]


def build_filter(column: int, *, memory_is_counted: bool = True, alone: bool = False) -> bytes:
    """The program for ``bwrap --seccomp``: an array of the kernel's ``struct sock_filter``.

    ``alone``: for a process that needs only its threads and its descriptors. It can't start another process or
    program, signal one, make a socket, or change a file's owner and mode.
    """
    code = _own_architecture(column)
    code += [(_JUMP_GREATER_EQUAL, 0, 1, NEWEST_KNOWN + 1), _fail(errno.ENOSYS)]
    # Not EPERM: after ENOSYS the C library falls back to clone, whose flags a filter can see.
    code += _when(CLONE3[column], [_fail(errno.ENOSYS)])
    for numbers in (*REFUSED.values(), *(NOT_ALONE.values() if alone else ())):
        code += _when(numbers[column], [_fail(errno.EPERM)])
    if alone:
        code += _when(CLONE[column], _require_bit(0, _THREAD_FLAG))
        # 0 is the process itself: limits of others stay out of reach.
        code += _when(PRLIMIT[column], _allow_only(0, (0,)))
    for number, body in _conditional(column, memory_is_counted):
        code += _when(number, body)
    return _assembled(code)


def build_operator_filter(column: int) -> bytes:
    """Calls of another architecture, which could bypass the filter, end the process."""
    code = _own_architecture(column)
    for name in KEYRINGS:
        code += _when(REFUSED[name][column], [_fail(errno.EPERM)])
    code += _when(FCNTL[column], _refuse_equal(1, 0xFFFFFFFF, _HOLDS_ON_FILES))
    return _assembled(code)


def _own_architecture(column: int) -> list[Instruction]:
    """Ends with the call's number loaded."""
    code: list[Instruction] = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[column]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD_WORD, 0, 0, _NUMBER),
    ]
    # x32 shares the architecture's number but has call numbers of its own, which the tables don't list.
    if column == X86_64:
        code += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL_PROCESS)]
    return code


def _assembled(code: list[Instruction]) -> bytes:
    allowed: Instruction = (_RETURN, 0, 0, _ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in (*code, allowed))


def _conditional(column: int, memory_is_counted: bool) -> Iterator[tuple[int | None, list[Instruction]]]:
    yield CLONE[column], _refuse_any_bit(0, _NAMESPACE_FLAGS)
    yield SOCKET[column], _sockets()
    yield SOCKETPAIR[column], _allow_only(0, (socket.AF_UNIX,))
    yield IOCTL[column], _refuse_equal(1, 0xFFFFFFFF, _TERMINAL_INPUT)
    yield FCNTL[column], _refuse_equal(1, 0xFFFFFFFF, _HOLDS_ON_FILES)
    devices = (stat.S_IFCHR, stat.S_IFBLK)
    yield MKNOD[column], _refuse_equal(1, 0o170000, devices)
    yield MKNODAT[column], _refuse_equal(2, 0o170000, devices)
    # RLIMIT_DATA counts private mappings alone.
    if not memory_is_counted:
        yield MMAP[column], _refuse_equal(3, _SHARED_ANONYMOUS, (_SHARED_ANONYMOUS,))
        for numbers in UNCOUNTED_MEMORY.values():
            yield numbers[column], [_fail(errno.EPERM)]


def _fail(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _when(number: int | None, body: list[Instruction]) -> list[Instruction]:
    """``body`` ends in a return on every path, so the call's number stays loaded for the next block."""
    return [] if number is None else [(_JUMP_EQUAL, 0, len(body), number), *body]


def _argument(index: int) -> Instruction:
    """The argument's lower half on a little-endian machine; the kernel itself reads each of these as 32 bits."""
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
