"""The process that becomes a sandbox: started bare, ahead of its need, by ``Sandbox`` and by nothing else.

``python -I -S launcher.py CONTROL_FD CGROUP_FILE…`` waits on its control socket for one order, then turns into
bubblewrap:

1. it enters the sandbox's cgroups before anything else and takes its limits on, so that nothing it starts is ever
   outside of them;
2. as root it makes a mount namespace in which the sandbox's sources are bound below ``/tmp``, because the user it
   is about to become may not enter the folders they are really in; then it becomes that user;
3. it leaves a *helper* process behind that stays outside of the sandbox: while bubblewrap waits on ``BLOCK_FD``
   until the worker writes to the pipe, the helper limits the number of processes inside (counted in the sandbox's
   own user namespace), opens listening sockets in the sandbox's own network, sends them to the worker together
   with a pidfd of the sandbox's first process, and ends.

Nothing of ours is imported: what is loaded here costs time at each cold start. An order is four bytes of length
and JSON, and the descriptors of standard output, standard error, the system call filter, the status pipe and the
pipe that bubblewrap waits on. The answer is one byte, ``READY`` with the descriptors (pidfd first) or ``FAILED``
followed by a reason; a control socket that just closes means that bubblewrap gave up, and its standard error says
why.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

ARGS_FD, SECCOMP_FD, INFO_FD, STATUS_FD, BLOCK_FD, FIRST_FILE_FD = 3, 4, 5, 6, 7, 8
READY, FAILED = b"R", b"F"
STAGE = "/tmp"

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_IP_FREEBIND = 15
_DESCRIPTORS = 5
# Above all numbers that bubblewrap gets its descriptors at, beginning with ARGS_FD.
_OUT_OF_REACH = 32
_BACKLOG = 64

_libc = ctypes.CDLL(None, use_errno=True)


def main(passed: int, cgroups: list[str]) -> None:
    control = _out_of_the_way(passed)
    parent = os.getppid()
    _die_with_parent(parent)
    hindrance = _enter(cgroups)
    header, descriptors, _, _ = socket.recv_fds(control, 4, _DESCRIPTORS)
    if len(header) < 4:
        return
    order = json.loads(_read(control, int.from_bytes(header, "big")))
    if hindrance is not None:
        control.sendall(FAILED + hindrance.encode())
        return
    try:
        _become_sandbox(control, order, descriptors, parent)
    except Exception as error:
        control.sendall(FAILED + f"{type(error).__name__}: {error}".encode())


def _out_of_the_way(passed: int) -> socket.socket:
    """The control socket was inherited, and must not be inherited any further."""
    moved = fcntl.fcntl(passed, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_REACH)
    os.close(passed)
    return socket.socket(fileno=moved)


def _enter(cgroups: list[str]) -> str | None:
    """Enter the cgroups in advance, because that takes the kernel some milliseconds; a failure is reported with
    the order."""
    try:
        for file in cgroups:
            with open(file, "w", encoding="ascii") as procs:
                procs.write("0")
    except OSError as error:
        return f"the cgroup can't be entered: {error}"
    return None


def _read(control: socket.socket, size: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = control.recv(size - len(chunks))
        if not chunk:
            sys.exit(0)
        chunks += chunk
    return bytes(chunks)


def _become_sandbox(
    control: socket.socket, order: dict[str, Any], descriptors: list[int], parent: int
) -> NoReturn:
    for name, soft, hard in order["rlimits"]:
        kind = getattr(resource, name)
        resource.setrlimit(kind, _no_more_than(resource.getrlimit(kind)[1], soft, hard))
    if order["uid"] is not None:
        stage(order["sources"])
    stdout, stderr, seccomp, status, block = descriptors
    info_read, info_write = os.pipe()
    if os.fork() == 0:
        os.close(info_write)
        _be_namespace_helper(control, order, info_read)
    # From here on nothing can be imported: the new user may not reach the interpreter's folder.
    if order["uid"] is not None:
        # Groups first: the new user has no right to change them.
        os.setgroups([])
        os.setresgid(order["uid"], order["uid"], order["uid"])
        os.setresuid(order["uid"], order["uid"], order["uid"])
    _die_with_parent(parent)
    arguments = "".join(argument + "\0" for argument in order["arguments"]).encode("utf-8", "surrogateescape")
    files = [_memory_file(text) for text in order["files"]]
    with open(os.devnull, "rb") as nothing:
        passed = [nothing.fileno(), stdout, stderr, _memory_file(arguments), seccomp, info_write, status]
        _set_descriptors([*passed, block, *files])
    argv = [order["program"], "--args", str(ARGS_FD), "--", *order["argv"]]
    os.execve(order["program"], argv, {})


def _no_more_than(allowed: int, soft: int, hard: int) -> tuple[int, int]:
    """A worker with tighter limits than the sandbox's passes its own on: they can't be raised."""
    if allowed == resource.RLIM_INFINITY:
        return soft, hard
    return min(soft, allowed), min(hard, allowed)


def _memory_file(content: str | bytes) -> int:
    descriptor = os.memfd_create("sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _set_descriptors(wanted: list[int]) -> None:
    """Place them at 0, 1, 2 …; other descriptors are closed when bubblewrap is executed."""
    # All of them out of reach first: dup2 could overwrite one that is still to be moved.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_REACH) for descriptor in wanted]
    for number, descriptor in enumerate(moved):
        os.dup2(descriptor, number, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= len(wanted):
            # The listing's own descriptor is closed by now.
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)


def stage(sources: list[str]) -> None:
    """Bind the sources below ``/tmp``. They are held open while it is covered, since they may lie below it."""
    call("unshare", _CLONE_NEWNS)
    # Private, so that no mount below propagates to the machine.
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    held = [os.open(source, os.O_PATH | os.O_NOFOLLOW) for source in sources]
    call("mount", b"tmpfs", STAGE.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755,size=1m")
    for number, descriptor in enumerate(held):
        place = f"{STAGE}/{number}"
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        call("mount", f"/proc/self/fd/{descriptor}".encode(), place.encode(), None, _MS_BIND | _MS_REC, None)
        os.close(descriptor)


def _be_namespace_helper(control: socket.socket, order: dict[str, Any], info: int) -> NoReturn:
    """The first process can't end before its pidfd is opened: it waits for the worker, which waits for us."""
    try:
        report = b""
        while b"}" not in report:
            chunk = os.read(info, 4096)
            if not chunk:
                os._exit(0)
            report += chunk
        child = int(json.loads(report)["child-pid"])
        pidfd = os.pidfd_open(child)
        # The user namespace comes along: it gives the right to enter the network that it owns.
        call("setns", pidfd, _CLONE_NEWUSER | _CLONE_NEWNET)
        allowed = resource.prlimit(child, resource.RLIMIT_NPROC)[1]
        limit = _no_more_than(allowed, order["processes"], order["processes"])
        resource.prlimit(child, resource.RLIMIT_NPROC, limit)
        listeners = [listen(port) for port in order["listen"]]
        socket.send_fds(control, [READY], [pidfd, *(listener.fileno() for listener in listeners)])
    except Exception as error:
        control.sendall(FAILED + f"the sandbox's namespaces can't be entered: {error}".encode())
        os._exit(1)
    os._exit(0)


def listen(port: int) -> socket.socket:
    """bubblewrap reports its child before the child has given the loopback interface its address, hence
    ``IP_FREEBIND``."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener


def _die_with_parent(parent: int) -> None:
    """A change of user undoes the request, so this is called before and after. A copy of ``tracelake.kernel``'s:
    nothing of ours is imported here."""
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


def call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
