"""A hostile program in place of a query's process: it reports what is within its reach.

It drops exactly the rights that a query's process drops, then tries. It sends one JSON object: the environment, the
descriptors that it found open, and for each attempt whether it was ``refused``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from tracelake import kernel
from tracelake.query.engine import restrict
from tracelake.query.engine.child import SlotSetup, take_channel


def main() -> None:
    """The channel brings the service's process number and paths, with the descriptor of an attached file."""
    setup = msgspec.json.decode(sys.argv[1], type=SlotSetup)
    with open("/proc/self/environ", encoding="utf-8") as given:
        environment = [entry.partition("=")[0] for entry in given.read().split("\0") if entry]
    found = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
    channel = take_channel()
    kernel.forbid_inspection()
    restrict.drop_rights(setup.folder)
    message, (attached,), _, _ = socket.recv_fds(channel, 65536, 1)
    order = json.loads(message)
    restrict.restrict_reads([attached], [*setup.libraries, *([setup.folder] if setup.folder else [])])
    outcomes = {name: _try(attempt) for name, attempt in attempts(order, attached)}
    report = {"environment": environment, "descriptors": found, "outcomes": outcomes}
    report["read"] = os.pread(os.open(f"/proc/self/fd/{attached}", os.O_RDONLY), 100, 0).decode()
    channel.sendall(json.dumps(report).encode())


def _try(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError:
        return "refused"
    return "done"


def attempts(order: dict[str, object], attached: int) -> Iterator[tuple[str, Callable[[], object]]]:
    service = int(str(order["service"]))
    paths = order["paths"]
    for path in paths if isinstance(paths, list) else []:
        yield f"read {path}", partial(_read, str(path))
    yield "the service's environment", partial(_read, f"/proc/{service}/environ")
    yield "the service's memory", partial(os.open, f"/proc/{service}/mem", os.O_RDWR)
    yield "the first process's environment", partial(_something, "/proc/1/environ")
    yield "write to the attached file", partial(os.open, f"/proc/self/fd/{attached}", os.O_RDWR)
    yield "empty the attached file", partial(os.truncate, f"/proc/self/fd/{attached}", 0)
    yield "its mode", partial(os.chmod, f"/proc/self/fd/{attached}", 0o666)
    yield "a file in /", partial(_write, "/probe")
    yield "a file in /var/tmp", partial(_write, "/var/tmp/tracelake-probe")
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
        yield f"a socket of family {family.name}", partial(socket.socket, family, socket.SOCK_STREAM)
    yield "a datagram socket", partial(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
    yield "another process", os.fork
    yield "another program", partial(os.execv, "/bin/true", ["true"])
    yield "a signal to the service", partial(os.kill, service, signal.SIGCONT)
    yield "a signal to all", partial(os.kill, -1, signal.SIGCONT)
    yield "another session", os.setsid
    yield "ptrace", partial(_call, "ptrace", 16, service, 0, 0)
    yield "a mount", partial(_call, "mount", b"none", b"/tmp", b"tmpfs", 0, None)
    yield "a namespace", partial(_call, "unshare", 0x10000000)


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1)


def _something(path: str) -> None:
    if not _read(path):
        raise OSError("empty")


def _write(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"written")


if __name__ == "__main__":
    main()
