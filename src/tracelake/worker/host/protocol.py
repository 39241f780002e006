"""What the wrapper and its operator host say to each other.

They share one sequential-packet socket: a message is one packet of JSON, with descriptors where the message says
so. The wrapper makes each operator's channel and keeps one end; the host only passes the other end on to the
process that it forks. Nothing here carries a credential of the platform.

    wrapper                                        host
       ── Setup ────────────────────────────▶      once
       ◀──────────────────────────── Up | Refused
       ── Spawn (+ channel) ────────────────▶
       ── Program (+ log) ──────────────────▶
       ◀────────────── Spawned (+ pidfd) | Failed
       ── Kill ─────────────────────────────▶
       ── Inspect ──────────────────────────▶      has it children?
       ◀─────────────────────────────── Inspected
       ◀─────────────────────────────────── Gone   it and everything that it left behind
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from tracelake.contracts.operator_protocol import SparkTarget

MAX_PACKET = 256 * 1024
_INT = array.array("i").itemsize
_MAX_DESCRIPTORS = 4


class Setup(Struct, frozen=True, kw_only=True, tag="setup"):
    """``hidden`` are files and folders with credentials, ``shown`` what operators must reach besides the
    interpreter, the objects and their work folder. ``user`` is whom to become when the host is root."""

    namespaces: bool
    home: str | None
    object_root: str
    work_folder: str
    operators: list[str]
    preload_spark: bool
    hidden: list[str]
    shown: list[str]
    user: str


class Spawn(Struct, frozen=True, tag="spawn"):
    """``spark`` is connected to before the process says that it is ready."""

    key: int
    spark: SparkTarget | None = None


class Program(Struct, frozen=True, tag="program"):
    key: int
    argv: list[str]
    env: dict[str, str]
    cwd: str

    def __repr__(self) -> str:
        return f"Program({self.key}, {self.argv[:1]}, …)"


class Kill(Struct, frozen=True, tag="kill"):
    key: int


class Inspect(Struct, frozen=True, tag="inspect"):
    key: int


ToHost = Setup | Spawn | Program | Kill | Inspect


class Up(Struct, frozen=True, kw_only=True, tag="up"):
    """``uid`` is None when operators run as the wrapper's own user."""

    view: str
    warnings: list[str]
    uid: int | None
    operators: list[str]


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """``NoNamespaces`` means that the host could be tried without them."""

    kind: Literal["NoNamespaces", "Unsafe", "Broken"]
    message: str


class Spawned(Struct, frozen=True, tag="spawned"):
    key: int


class Failed(Struct, frozen=True, tag="failed"):
    key: int
    message: str


class Inspected(Struct, frozen=True, tag="inspected"):
    key: int
    children: int


class Gone(Struct, frozen=True, tag="gone"):
    """``status`` is the exit code, negative for a signal, as in ``subprocess``."""

    key: int
    status: int


FromHost = Up | Refused | Spawned | Failed | Inspected | Gone

_encoder = msgspec.json.Encoder()
_to_host: msgspec.json.Decoder[ToHost] = msgspec.json.Decoder(ToHost)
_from_host: msgspec.json.Decoder[FromHost] = msgspec.json.Decoder(FromHost)


def send_packet(sock: socket.socket, message: ToHost | FromHost, descriptors: Sequence[int] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([_encoder.encode(message)], rights, socket.MSG_NOSIGNAL)


def read_to_host(sock: socket.socket) -> tuple[ToHost, list[int]] | None:
    """None when the wrapper is gone."""
    body, descriptors = _receive(sock)
    return (_to_host.decode(body), descriptors) if body else None


def read_from_host(sock: socket.socket) -> tuple[FromHost, list[int]] | None:
    """None when the host is gone. Whatever else comes is an error: the host is ours, but what it loaded isn't."""
    body, descriptors = _receive(sock)
    if not body:
        return None
    try:
        return _from_host.decode(body), descriptors
    except (msgspec.MsgspecError, UnicodeDecodeError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    body, ancillary, _, _ = sock.recvmsg(
        MAX_PACKET, socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % _INT])
    return body, list(descriptors)
