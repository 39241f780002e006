"""Sockets between processes of one machine, safe from its other users: held ports, socket files, peers' user ids.

A loopback port is open to every user of the machine, and the next process that listens there gets the credentials
that were meant for the last one. So a supervisor holds the ports of its servers (``HeldPort``): a server inherits
the socket and listens on it, and when it crashes the port stays taken. On Linux a socket that has stopped listening
keeps its port; elsewhere it doesn't, and nothing is held.

Two processes of one user use a socket file in a folder of mode 0700, which others can't reach. The connecting side
checks that folder and socket belong to its own user or root before it sends anything; the listening side gets the
caller's user id from the kernel (``SO_PEERCRED``). Addresses are ``unix:///path``, percent-encoded. Paths may be
longer than a socket address: both ends go by the folder's descriptor.

``uid_of_loopback_peer`` asks the kernel (``sock_diag``) which user is at the other end of a loopback connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TypeGuard
from urllib.parse import quote, unquote, urlsplit

from tracelake.domain.errors import Conflict
from tracelake.settings import whole_number

LOOPBACK = "127.0.0.1"
_INHERITED = "TRACELAKE_LISTEN_FDS"
_MOST_DESCRIPTORS = 2**31 - 1
_CAN_HOLD = sys.platform == "linux"
SCHEME = "unix://"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_BACKLOG = 128
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_ADDRESSES = struct.Struct("!HH16s16s")
_ANY_INTERFACE_AND_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_UID = struct.Struct("=I")
_UID_OFFSET = 80
_ANSWER_SECONDS = 1.0


class HeldPort:
    """A bound loopback port; ``port=0`` takes any free one. ``socket`` is None where a port can't be held."""

    def __init__(self, port: int) -> None:
        made = socket.socket()
        try:
            # Connections of the last run may still be closing.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((LOOPBACK, port or _free_port()))
            self.number = int(made.getsockname()[1])
            made.listen(1)
        except BaseException:
            made.close()
            raise
        self.socket: socket.socket | None = None
        if _CAN_HOLD:
            self.socket = made
            self.refuse()
        else:
            made.close()

    def refuse(self) -> None:
        """Connections are refused until a server listens again."""
        if self.socket is not None:
            stop_listening(self.socket)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()


def stop_listening(listening: socket.socket) -> None:
    """In every process that has the socket. It keeps its port, also from sockets that would share it
    (``SO_REUSEADDR``)."""
    with suppress(OSError):
        # With the option another user's socket could be bound to the port while this one doesn't listen.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        listening.shutdown(socket.SHUT_RD)


def handed_down(ports: Mapping[str, HeldPort]) -> tuple[dict[str, str], tuple[int, ...]]:
    """The environment variable that names a child's inherited sockets, and their descriptors."""
    given = {name: port.socket.fileno() for name, port in ports.items() if port.socket is not None}
    if not given:
        return {}, ()
    listed = ",".join(f"{name}={descriptor}" for name, descriptor in given.items())
    return {_INHERITED: listed}, tuple(given.values())


def inherited(name: str, host: str, port: int, environment: MutableMapping[str, str]) -> socket.socket | None:
    """The socket of this name that the parent holds, if it is bound to exactly this address. Each is taken once,
    and children of this process don't inherit it."""
    given = dict(part.split("=", 1) for part in environment.get(_INHERITED, "").split(",") if "=" in part)
    descriptor = given.pop(name, "")
    environment[_INHERITED] = ",".join(f"{each}={left}" for each, left in given.items())
    if not given:
        del environment[_INHERITED]
    number = whole_number(descriptor, 0, _MOST_DESCRIPTORS)
    if number is None:
        return None
    # A child that kept it would hold the port after this process has ended.
    os.set_inheritable(number, False)
    found = socket.socket(fileno=number)
    # A parent with other settings has bound another address; this process's own settings count.
    if found.getsockname() != (host, port):
        found.close()
        return None
    # Connections that it accepts must not be in the way when it listens again.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return found


def bound(what: str, host: str, port: int) -> socket.socket:
    """A socket bound to the address; ``what`` names the port in the error for one that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    # Connections of a process that has just ended may keep the port for a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise Conflict(
            "PortTaken",
            f"the {what} port {host}:{port} can't be used ({error.strerror}); choose another, or 0",
        ) from None
    return listening


def _free_port() -> int:
    """The kernel releases a port that it chose itself when the socket stops listening, but not one asked for by
    number."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def listen_privately(path: Path) -> socket.socket:
    """A listener at a path in a folder of this user. A socket file left by a predecessor is replaced."""
    folder = os.open(path.parent, _FOLDER)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Before the socket exists, so that there is no moment in which another user could connect.
        os.chmod(path.parent, 0o700)
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        # A socket's path has at most 107 bytes; by the folder's descriptor it is always short.
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.chmod(path.name, 0o600, dir_fd=folder)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    finally:
        os.close(folder)
    return made


def private_address(path: Path) -> str:
    return SCHEME + quote(str(path))


def is_loopback_url(url: str) -> bool:
    """Whether a URL leads to this machine by loopback, so that a socket file can be reached from there."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


async def connect_privately(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises ``OSError`` when no process listens there, or one that belongs neither to this user nor to root."""
    path = Path(unquote(address.removeprefix(SCHEME)))
    folder = os.open(path.parent, _FOLDER)
    try:
        # By descriptor: the path could lead elsewhere a moment later.
        _check_owner(os.fstat(folder))
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISSOCK(found.st_mode):
            raise ConnectionRefusedError(f"{path} is no socket")
        _check_owner(found)
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    # The owner of the file needn't be the one who listens.
    if uid_of_socket_peer(writer) not in (0, os.getuid()):
        writer.transport.abort()
        raise PermissionError(f"another user listens at {path}")
    return reader, writer


def uid_of_socket_peer(writer: asyncio.StreamWriter) -> int | None:
    """The user id of the other end; None for a socket that isn't a socket file's."""
    connected: socket.socket = writer.get_extra_info("socket")
    if connected.family != socket.AF_UNIX:
        return None
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _check_owner(found: os.stat_result) -> None:
    """Raises when another user could have put it there, or replaced it."""
    if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
        raise PermissionError("the socket, or its folder, isn't this user's alone")


def uid_of_loopback_peer(peer: object, here: object) -> int | None:
    """The user id of the socket at ``peer`` in the connection between ``peer`` and ``here``, both as returned by
    ``getpeername`` and ``getsockname``; None when the other end isn't on this machine, or the kernel doesn't
    know."""
    if not (_is_loopback(peer) and _is_loopback(here)):
        return None
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            # This runs on the event loop, which must not wait for an answer that never comes.
            kernel.settimeout(_ANSWER_SECONDS)
            kernel.sendto(_question(peer, here), (0, 0))
            answer = kernel.recv(4096)
    # Only Linux has netlink. Without an answer the address alone is counted.
    except (OSError, AttributeError):
        return None
    kind = _HEADER.unpack_from(answer)[1] if len(answer) >= _HEADER.size else 0
    # An error, as for a connection that has ended meanwhile, comes as another kind of message.
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _UID_OFFSET + _UID.size:
        return None
    return int(_UID.unpack_from(answer, _UID_OFFSET)[0])


def _question(peer: tuple[str, int], here: tuple[str, int]) -> bytes:
    addresses = _ADDRESSES.pack(peer[1], here[1], socket.inet_aton(peer[0]), socket.inet_aton(here[0]))
    every_state = 0xFFFFFFFF
    body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, every_state)
    body += addresses + _ANY_INTERFACE_AND_COOKIE
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + body


def _is_loopback(address: object) -> TypeGuard[tuple[str, int]]:
    if isinstance(address, tuple) and len(address) == 2 and isinstance(address[0], str):
        with suppress(OSError):
            return socket.inet_aton(address[0])[0] == 127
    return False
