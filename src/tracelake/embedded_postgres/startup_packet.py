"""What a client says first to a Postgres server, judged before the server hears of it.

A server writes down what is wrong with a greeting, before it asks for a password and as long as it came: 15 KB for
each connection of a stranger. So a greeting is small and plain, or the server never gets it. Whether the server is
asked for encryption is answered here, since it has none.
"""

from __future__ import annotations

import re
import struct
from enum import Enum

LARGEST = 4096
_ENCRYPTION = (80877103, 80877104)
_CANCEL = 80877102
_CANCEL_BYTES = 12 + 256
_PROTOCOL = 3
_HEADER = struct.Struct("!II")
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_.]{0,62}")
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_LONGEST = {b"user": 63, b"database": 63}
_LONGEST_VALUE = 1024
# A walsender's connection isn't for logins of ours, and what is wrong with its value is written down as it came.
_REFUSED = (b"replication",)


class Greeting(Enum):
    """What is to be done with what has been said so far."""

    WAIT = "there is more to come"
    DECLINE_ENCRYPTION = "the next greeting comes after an N"
    FORWARD = "the server may hear it"
    REFUSE = "nobody says that who means well"


def judge(said: bytes) -> tuple[Greeting, int]:
    """Of the first message in ``said``, and how long that is."""
    if len(said) < 4:
        return Greeting.WAIT, 0
    size = int.from_bytes(said[:4], "big")
    if not _HEADER.size <= size <= LARGEST:
        return Greeting.REFUSE, 0
    if len(said) < size:
        return Greeting.WAIT, 0
    code = _HEADER.unpack_from(said)[1]
    if code in _ENCRYPTION:
        return (Greeting.DECLINE_ENCRYPTION if size == _HEADER.size else Greeting.REFUSE), size
    if code == _CANCEL:
        return (Greeting.FORWARD if size <= _CANCEL_BYTES else Greeting.REFUSE), size
    if code >> 16 != _PROTOCOL or not _is_plain(said[_HEADER.size : size]):
        return Greeting.REFUSE, size
    return Greeting.FORWARD, size


def _is_plain(parameters: bytes) -> bool:
    """Names and values, each with a zero behind it, and a zero behind all of them. A name is that of a setting, as
    drivers send many; a user is among them."""
    if parameters[-2:] != b"\0\0":
        return False
    parts = parameters[:-2].split(b"\0")
    if len(parts) % 2:
        return False
    given = dict(zip(parts[::2], parts[1::2], strict=True))
    return (
        len(given) == len(parts) // 2
        and b"user" in given
        and all(_is_plain_parameter(name, value) for name, value in given.items())
    )


def _is_plain_parameter(name: bytes, value: bytes) -> bool:
    return (
        _NAME.fullmatch(name) is not None
        and name.lower() not in _REFUSED
        and len(value) <= _LONGEST.get(name, _LONGEST_VALUE)
        and _CONTROL.search(value) is None
    )


def refusal() -> bytes:
    """An error as a server sends it."""
    fields = b"SFATAL\0VFATAL\0C08P01\0Mthe port takes no such startup packet\0\0"
    return b"E" + struct.pack("!I", 4 + len(fields)) + fields
