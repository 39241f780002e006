"""System calls that Python doesn't offer, and questions to ``/proc``; the one module for kernel calls.

It covers namespaces, mounts, capabilities, process attributes, filters for system calls, Landlock, keyrings,
opening beneath a folder, dying with the parent process, and the children of a process. A call raises ``OSError``
with its own name, so that a refusal says which right was missing. Process numbers are those of ``/proc``, which
must belong to the caller's own process namespace.

``sandbox/launcher.py`` and ``sandbox/canary.py`` have calls of their own, since they run on the bare interpreter
and import nothing of ours.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 0x1
# The numbers of calls that the C library has no function for. Newer calls have the same on every architecture.
_OPENAT2 = 437
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_SECCOMP = {"x86_64": 317, "amd64": 317, "aarch64": 277, "arm64": 277}
_KEYCTL = {"x86_64": 250, "amd64": 250, "aarch64": 219, "arm64": 219}
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_SECCOMP_SET_FILTER = 1
_SECCOMP_SPEC_ALLOW = 1 << 2
"""Kernels before 5.16 would slow a filtered process down otherwise."""
_NOT_HERE = (errno.EINVAL, errno.ENOSYS)
_KEYCTL_GET_ID, _KEYCTL_JOIN_SESSION, _KEYCTL_CLEAR, _KEYCTL_GET_PERSISTENT = 0, 1, 7, 22
_PROCESS_KEYS, _SESSION_KEYS, _USER_KEYS, _USER_SESSION_KEYS = -2, -3, -4, -5
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_HOOK_FAILED = 1
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SETPCAP = 8
_MAX_CAPABILITY = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_open_sandboxes = 0


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


class _FilterProgram(ctypes.Structure):
    """A seccomp filter, as the kernel takes it: the number of instructions and their address."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


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
    """Detach a mount: it disappears at once, and files that are open on it stay usable."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount of {target}")


def mount_read_only_below(target: str) -> None:
    """Make this mount and all mounts below it read-only; since Linux 5.12."""
    attributes = _MountAttributes(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _system_call(
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(result, f"mount_setattr of {target}")


def openat2(folder: int, path: str, flags: int, mode: int, resolve: int) -> int:
    """Open a path relative to a folder's descriptor; ``resolve`` limits where it may lead. Since Linux 5.6."""
    how = _OpenHow(flags, mode, resolve)
    descriptor = _system_call(
        _OPENAT2,
        ctypes.c_int(folder),
        os.fsencode(path),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if descriptor < 0:
        # With the path as the error's own, as ``os.open`` does it.
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return descriptor


def die_with_parent(parent: int | None = None, *, exit_code: int = 0) -> None:
    """Have the kernel kill this process when its parent ends. A change of identity undoes it: call this after.

    The parent may have ended before the call. A caller that knows its pid gives ``parent``; if that is no longer
    the parent, the process exits with ``exit_code``.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # After the request: whenever the parent ends, either the kernel or this line notices.
    if parent is not None and os.getppid() != parent:
        os._exit(exit_code)


def parent_death_hook(death_signal: signal.Signals) -> Callable[[], None] | None:
    """A ``preexec_fn`` that has the kernel send ``death_signal`` to the child when this process ends.

    Little is safe between fork and exec in a process with threads, so everything is looked up here, and the child
    makes two system calls. ``subprocess`` calls the hook after the change of user, which would undo the request.
    The signal is sent when the *thread* that forked ends. None where the kernel isn't Linux: there a child outlives
    a parent that was killed.
    """
    if not sys.platform.startswith("linux"):
        return None
    # Without ``use_errno``, which would add work with Python objects in the child.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
    request = (_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)

    def in_child() -> None:
        if prctl(*request) != 0 or os.getppid() != parent:
            os._exit(_HOOK_FAILED)

    return in_child


def forbid_inspection() -> None:
    """No other process of the same user can trace this one or read its memory and environment."""
    _prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_bounding_set() -> None:
    """Give up all capabilities for good, also those that a program with file capabilities would add.

    A process that isn't allowed to has no capability to lose, and ``gain_no_privileges`` keeps it so.
    """
    # Dropping takes CAP_SETPCAP itself, so that one goes last.
    last = _CAP_SETPCAP
    for capability in (*(each for each in range(_MAX_CAPABILITY) if each != last), last):
        if _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_capabilities() -> None:
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    # Version 3 has 64 capabilities, in two words of 32.
    nothing = (_CapabilityData * 2)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")


def gain_no_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_system_calls(program: bytes) -> None:
    """Put this thread, and threads it starts, under a seccomp filter; needs ``gain_no_privileges`` first."""
    # An instruction has eight bytes.
    argument = _FilterProgram(len(program) // 8, program)
    zero = ctypes.c_ulong(0)
    result = _libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(argument), zero, zero
    )
    _check(result, "prctl PR_SET_SECCOMP")


def filter_own_calls(program: bytes) -> None:
    """Like ``filter_system_calls``, at the speed of before, also on older kernels.

    A kernel or machine without such filters is left as it is.
    """
    number = _SECCOMP.get(platform.machine().lower())
    if number is None:
        return
    argument = _FilterProgram(len(program) // 8, program)
    # A kernel that doesn't know the flag answers EINVAL, and is asked again without it.
    for flags in (_SECCOMP_SPEC_ALLOW, 0):
        wish = (ctypes.c_long(_SECCOMP_SET_FILTER), ctypes.c_long(flags), ctypes.byref(argument))
        result = _system_call(number, *wish)
        if result == 0:
            return
        if ctypes.get_errno() not in _NOT_HERE:
            _check(result, "seccomp")


def landlock_version() -> int:
    """0 where the kernel has no Landlock; it came with Linux 5.13."""
    wish = (None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION))
    return max(0, _system_call(_LANDLOCK_CREATE_RULESET, *wish))


def create_ruleset(rights: int) -> int:
    """A descriptor of Landlock rules that forbid these rights wherever no rule allows them."""
    attributes = struct.pack("=Q", rights)
    size = ctypes.c_size_t(len(attributes))
    ruleset = _system_call(_LANDLOCK_CREATE_RULESET, attributes, size, ctypes.c_uint32(0))
    _check(min(ruleset, 0), "landlock_create_ruleset")
    return ruleset


def allow_beneath(ruleset: int, descriptor: int, rights: int) -> None:
    # The kernel's struct is packed: there is no padding between its two members.
    rule = struct.pack("=Qi", rights, descriptor)
    wish = (ctypes.c_int(ruleset), ctypes.c_int(_LANDLOCK_PATH_BENEATH), rule, ctypes.c_uint32(0))
    _check(_system_call(_LANDLOCK_ADD_RULE, *wish), "landlock_add_rule")


def restrict_self(ruleset: int) -> None:
    """Put this thread, and threads it starts, under the rules; needs ``gain_no_privileges`` first."""
    wish = (ctypes.c_int(ruleset), ctypes.c_uint32(0))
    _check(_system_call(_LANDLOCK_RESTRICT_SELF, *wish), "landlock_restrict_self")


def keyrings_can_be_used() -> bool:
    """Whether this process, as it is, can use keyrings."""
    number = _KEYCTL.get(platform.machine().lower())
    if number is None:
        return False
    wish = (ctypes.c_long(_KEYCTL_GET_ID), ctypes.c_long(_SESSION_KEYS), None, None)
    return _system_call(number, *wish) >= 0


def leaving_keyrings(*, empty: bool) -> Callable[[], None]:
    """A function that only makes system calls, for use between fork and exec: it leaves the session's keyring.
    ``empty``: it also empties those of the process's user. A refusal is ignored."""
    number, call = _KEYCTL.get(platform.machine().lower()), _libc.syscall
    # As long: ctypes passes plain integers as C int, and syscall() reads whole registers.
    join = (ctypes.c_long(_KEYCTL_JOIN_SESSION), None, None, None)
    clear = ctypes.c_long(_KEYCTL_CLEAR)
    clears = [(clear, ctypes.c_long(which), None, None) for which in (_USER_KEYS, _USER_SESSION_KEYS)]
    persistent = (
        ctypes.c_long(_KEYCTL_GET_PERSISTENT),
        ctypes.c_long(-1),
        ctypes.c_long(_PROCESS_KEYS),
        None,
    )

    def in_child() -> None:
        if number is None:
            return
        call(number, *join)
        if empty:
            for each in clears:
                call(number, *each)
            found = call(number, *persistent)
            if found > 0:
                call(number, clear, ctypes.c_long(found), None, None)

    return in_child


def _prctl(option: int, argument: int) -> None:
    # As long: the kernel reads whole registers, and ctypes passes a plain integer as C int.
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl {option}")


def _system_call(number: int, *arguments: object) -> int:
    """A call that the C library has no function for; negative when the kernel refused it."""
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def children_of(pid: int) -> list[int]:
    """The children of all threads of a process; none when it is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        # A process without this file: the kernel was built without CONFIG_PROC_CHILDREN.
        if os.path.exists(f"/proc/{pid}"):
            return _by_parent(pid)
    except ProcessLookupError:
        pass
    return found


class ChildrenFile:
    """Answers again and again whether a process has children, for one system call each time.

    It counts the children of the first thread, which inherits those of threads that have ended.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    @property
    def any(self) -> bool | None:
        """None when it is unknown: the kernel keeps no list, or the process is gone."""
        if self._descriptor < 0:
            return None
        try:
            return bool(os.pread(self._descriptor, 1, 0))
        except OSError:
            return None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def kill_children() -> None:
    """Kill and reap children until none is left; a process that adopts orphans then has no descendant."""
    while True:
        # Each round finds the orphans of the processes that the last one killed.
        for pid in children_of(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _by_parent(pid: int) -> list[int]:
    """The children of a process, on a kernel that keeps no list: by the parent of every process."""
    found: list[int] = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name in parentheses may hold anything, parentheses and spaces included.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(name))
    return found


def take_orphans() -> None:
    """Adopt orphans while at least one sandbox is open; ``leave_orphans`` must follow.

    bubblewrap ends before the first process inside, which then becomes an orphan. Init processes of containers
    often reap no orphans, and each sandbox would leave a zombie.
    """
    global _open_sandboxes
    _open_sandboxes += 1
    _set_subreaper(True)


def leave_orphans() -> None:
    global _open_sandboxes
    _open_sandboxes -= 1
    if _open_sandboxes == 0:
        _set_subreaper(False)


def _set_subreaper(on: bool) -> None:
    # Without it zombies stay longer, which is no reason to refuse a sandbox.
    with suppress(OSError, AttributeError):
        _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def pid_of(pidfd: int) -> int:
    """The process that a pidfd refers to; -1 once it has been reaped."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1


def reap_sandbox(init: int, group: int) -> bool:
    """Reap a sandbox's first process, and its namespace helper, which bubblewrap doesn't wait for; False while one
    of them hasn't ended."""
    ended = True
    for which in (init, -group):
        with suppress(ChildProcessError):
            # waitpid(-1) would reap any child of ours; `pid_of` gives -1 for a process that is gone.
            while abs(which) != 1:
                if os.waitpid(which, os.WNOHANG)[0] == 0:
                    ended = False
                    break
    return ended


def reap_group(group: int) -> None:
    """Wait for every process of a group that has been killed, or ends by itself."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)
