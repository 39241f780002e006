"""A socket between two processes of one user on one machine: a file that nobody else may reach, and both ends look.

A port on loopback is open to every user of the machine: anybody can fill it with connections, and whoever listens
there next is given what was meant for another. A socket file in a folder of mode 0700 can't be reached by others at
all. The one who connects makes sure that folder and socket are its own user's, or root's, before it says anything;
the one who listens is told by the kernel who called (``SO_PEERCRED``).

Addresses are ``unix:///path``, percent-encoded. Paths may be longer than what a socket's address holds: both ends
go by the folder's descriptor.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

SCHEME = "unix://"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_BACKLOG = 128


def listen(path: Path) -> socket.socket:
    """A listener at a path whose folder is this user's own. What a predecessor left there is replaced."""
    folder = os.open(path.parent, _FOLDER)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.chmod(path.parent, 0o700)
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
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


def address_of(path: Path) -> str:
    return SCHEME + quote(str(path))


def is_here(url: str) -> bool:
    """Whether a URL leads to this machine by loopback, so that a socket file can be reached from there."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """``OSError`` when nobody listens there, or somebody who isn't this user or root."""
    path = Path(unquote(address.removeprefix(SCHEME)))
    folder = os.open(path.parent, _FOLDER)
    try:
        _check_owner(os.fstat(folder))
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISSOCK(found.st_mode):
            raise ConnectionRefusedError(f"{path} is no socket")
        _check_owner(found)
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    if uid_of(writer) not in (0, os.getuid()):
        writer.transport.abort()
        raise PermissionError(f"somebody else listens at {path}")
    return reader, writer


def uid_of(writer: asyncio.StreamWriter) -> int | None:
    """Whose the other end is; None where the kernel can't say."""
    connected: socket.socket = writer.get_extra_info("socket")
    if connected.family != socket.AF_UNIX:
        return None
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _check_owner(found: os.stat_result) -> None:
    """Nobody else may have put it there, or put another in its place."""
    if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
        raise PermissionError("the socket, or its folder, isn't this user's alone")
