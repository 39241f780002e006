"""Messages between the wrapper and its operator host.

They share one sequential-packet socket: a message is one packet of JSON, with descriptors where the message says
so. The wrapper makes each operator's channel and keeps one end; the host only passes the other end on to the
process that it forks. Nothing here carries a credential of the platform.

    wrapper                                        host
       ── Setup ────────────────────────────▶      once
       ◀──────────────────────────── Up | Refused
       ── Spawn (+ channel, line) ──────────▶
       ── Program (+ log, line) ────────────▶
       ◀────────────── Spawned (+ pidfd) | Failed
       ── Kill ─────────────────────────────▶
       ◀─────────────────────────────────── Gone   it and everything that it left behind

Each process that the host starts has a keeper (``keeper``), which the wrapper reaches by a ``line`` of its own:

    wrapper                                        keeper
       ◀─────────────────────────── ProcessStarted (+ pidfd)
       ── Grant | Withdraw ─────────────────▶      what the process sees of the objects
       ◀──────────────────────────────────── Done
       ◀─────────────────────────────────── Ended  how the process itself ended
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
from tracelake.sandbox.accounts import Account

MAX_PACKET = 256 * 1024
_INT = array.array("i").itemsize
_MAX_DESCRIPTORS = 4


class ProcessIdentity(Struct, frozen=True):
    """One process's folder, and the account that it runs under; None is the wrapper's own user."""

    folder: str
    account: Account | None


class HostSetup(Struct, frozen=True, kw_only=True, tag="setup"):
    """``hidden`` are files and folders with credentials; ``shown`` are paths that operators need besides the
    interpreter, the objects and their folder. ``account`` and ``folder`` belong to the process that proves the
    view: operator processes get others of the same kind. ``provers`` are those of the processes that load the
    ``operators`` for the first time, one for each source.
    """

    namespaces: bool
    home: str | None
    object_root: str
    work_folder: str
    operators: list[str]
    preload_spark: bool
    hidden: list[str]
    shown: list[str]
    folder: str
    account: Account | None
    provers: list[ProcessIdentity]


class Spawn(Struct, frozen=True, tag="spawn"):
    """``folder`` is the process's own, below the work folder. Before it reports ready, the process connects to
    ``spark`` and loads the operators of ``source``."""

    key: int
    folder: str
    account: Account | None = None
    spark: SparkTarget | None = None
    source: str | None = None


class Program(Struct, frozen=True, tag="program"):
    """It starts in its ``folder``, and can read every dataset's files."""

    key: int
    folder: str
    account: Account | None
    argv: list[str]
    env: dict[str, str]

    def __repr__(self) -> str:
        return f"Program({self.key}, {self.argv[:1]}, …)"


class Kill(Struct, frozen=True, tag="kill"):
    key: int


ToHost = HostSetup | Spawn | Program | Kill


class Up(Struct, frozen=True, kw_only=True, tag="up"):
    """``operators`` are all operators, each with the source that it is loaded from; None for those that need
    none. ``failed`` are sources that were left out, and why. ``sealed``: a process can't keep files that are
    withdrawn from it."""

    view: str
    warnings: list[str]
    operators: dict[str, str | None]
    failed: dict[str, str]
    sealed: bool


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """``NoNamespaces`` means that the host could be tried without them."""

    kind: Literal["NoNamespaces", "Unsafe", "Broken"]
    message: str


class Spawned(Struct, frozen=True, tag="spawned"):
    key: int


class SpawnFailed(Struct, frozen=True, tag="failed"):
    key: int
    message: str


class Gone(Struct, frozen=True, tag="gone"):
    """``status`` is the keeper's exit code, negative for a signal, as in ``subprocess``."""

    key: int
    status: int


FromHost = Up | Refused | Spawned | SpawnFailed | Gone


class Grant(Struct, frozen=True, tag="grant"):
    """Folders below the object root, named relative to it: some for reading, some for writing."""

    number: int
    reads: list[str]
    writes: list[str]


class Withdraw(Struct, frozen=True, tag="withdraw"):
    """Make the folders read-only, then invisible. One with a file open for writing stays as it is, unless
    ``force`` is set: then it becomes invisible all the same."""

    number: int
    places: list[str]
    force: bool = False


ToKeeper = Grant | Withdraw


class ProcessStarted(Struct, frozen=True, tag="born"):
    pass


class Done(Struct, frozen=True, kw_only=True, tag="done"):
    """``busy`` are places with a file open for writing; ``problem`` says why the order failed."""

    number: int
    busy: list[str] = []
    problem: str | None = None


class ProcessEnded(Struct, frozen=True, tag="ended"):
    status: int


FromKeeper = ProcessStarted | Done | ProcessEnded

_encoder = msgspec.json.Encoder()
_to_host: msgspec.json.Decoder[ToHost] = msgspec.json.Decoder(ToHost)
_from_host: msgspec.json.Decoder[FromHost] = msgspec.json.Decoder(FromHost)
_to_keeper: msgspec.json.Decoder[ToKeeper] = msgspec.json.Decoder(ToKeeper)
_from_keeper: msgspec.json.Decoder[FromKeeper] = msgspec.json.Decoder(FromKeeper)


def send_packet(
    sock: socket.socket,
    message: ToHost | FromHost | ToKeeper | FromKeeper,
    descriptors: Sequence[int] = (),
) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([_encoder.encode(message)], rights, socket.MSG_NOSIGNAL)


def read_to_host(sock: socket.socket) -> tuple[ToHost, list[int]] | None:
    """The next message; None when the wrapper is gone."""
    body, descriptors = _receive(sock)
    return (_to_host.decode(body), descriptors) if body else None


def read_from_host(sock: socket.socket) -> tuple[FromHost, list[int]] | None:
    """The next message; None when the host is gone. Anything else is an error: the host is ours, but the code
    that it loaded isn't."""
    body, descriptors = _receive(sock)
    if not body:
        return None
    try:
        return _from_host.decode(body), descriptors
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # Nothing else knows their numbers, so they would stay open.
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def read_to_keeper(sock: socket.socket) -> ToKeeper | None:
    body, descriptors = _receive(sock)
    for descriptor in descriptors:
        os.close(descriptor)
    return _to_keeper.decode(body) if body else None


def read_from_keeper(sock: socket.socket) -> tuple[FromKeeper, list[int]] | None:
    body, descriptors = _receive(sock)
    return (_from_keeper.decode(body), descriptors) if body else None


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    body, ancillary, _, _ = sock.recvmsg(
        MAX_PACKET, socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # A control message that was cut off may end within a number.
            descriptors.frombytes(data[: len(data) - len(data) % _INT])
    return body, list(descriptors)
