"""Tries to escape from a sandbox, before it is trusted. Runs inside, on the bare interpreter; imports nothing of
ours.

``python -I -S canary.py PORT PATH…`` prints a line for each open way out, then ``done``. The worker listens on
the port, and the paths are files that every user may read outside.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial

_CLONE_NEWUSER = 0x10000000


def attempts(port: int, paths: list[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    libc = ctypes.CDLL(None, use_errno=True)
    yield "the host's loopback network", lambda: socket.create_connection(("127.0.0.1", port), timeout=5)
    # The metadata address of clouds, which gives out credentials of the machine.
    yield "a network beyond", lambda: socket.create_connection(("169.254.169.254", 80), timeout=1)
    for path in paths:
        yield f"the host's file {path}", partial(os.stat, path)
    for folder in ("/", "/usr", "/var/task", "/opt", "/dev", "/etc", "/proc/sys/kernel"):
        yield f"writing to {folder}", partial(_write, f"{folder}/canary")
    yield "raw sockets", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    yield "packet sockets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    yield "ptrace", lambda: _zero(libc.ptrace(0, 0, 0, 0))
    yield "new namespaces", lambda: _zero(libc.unshare(_CLONE_NEWUSER))
    yield "mounts", lambda: _zero(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
    yield "the environment of the first process", lambda: _something("/proc/1/environ")
    yield "a descriptor of the worker's", lambda: _zero(0 if any(map(_is_open, range(3, 1024))) else 1)
    # Two are expected: bubblewrap's init and the canary.
    yield "processes of the host", lambda: _zero(0 if len(_processes()) > 2 else 1)
    yield (
        "privileges",
        lambda: _zero(0 if "CapEff:\t0000000000000000" not in _read("/proc/self/status") else 1),
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _zero(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "refused")


def _something(path: str) -> None:
    if not _read(path):
        raise OSError("empty")


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _write(path: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write("written")


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def main(port: int, paths: list[str]) -> None:
    for name, attempt in attempts(port, paths):
        try:
            attempt()
        # Only these are refusals: any other error ends the
        # canary without `done`, and the sandbox isn't trusted.
        except OSError:
            continue
        sys.stdout.write(f"{name}\n")
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
