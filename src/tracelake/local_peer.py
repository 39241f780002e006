"""Which user of this machine is at the other end of a loopback connection: the kernel knows (``sock_diag``)."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TypeGuard

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


def uid_of(peer: object, here: object) -> int | None:
    """Whose socket is at ``peer`` of the connection between ``peer`` and ``here``, both as ``getpeername`` and
    ``getsockname`` tell them; None when the other end isn't on this machine, or the kernel doesn't say."""
    if not (_is_loopback(peer) and _is_loopback(here)):
        return None
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_ANSWER_SECONDS)
            kernel.sendto(_question(peer, here), (0, 0))
            answer = kernel.recv(4096)
    except (OSError, AttributeError):
        return None
    kind = _HEADER.unpack_from(answer)[1] if len(answer) >= _HEADER.size else 0
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
