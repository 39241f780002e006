"""A loopback port that one process holds and another one listens on.

Whoever keeps servers running holds their ports: a server that has crashed must not leave its port to another user
of the machine, to whom clients would send their credentials. The server inherits the holder's socket, and listens
on it. On Linux a socket that has stopped listening keeps its port; elsewhere it doesn't, and nothing is held.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from tracelake.environment_settings import whole_number

LOOPBACK = "127.0.0.1"
_INHERITED = "TRACELAKE_LISTEN_FDS"
_MOST_DESCRIPTORS = 2**31 - 1
_CAN_HOLD = sys.platform == "linux"


class HeldPort:
    """``port=0`` takes any free one. ``socket`` is bound to it; None where a port can't be held."""

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
        """Connections are refused until somebody listens again."""
        if self.socket is not None:
            stop_listening(self.socket)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()


def stop_listening(listening: socket.socket) -> None:
    """Everybody's who has the socket. It keeps its port, also from those who would share it (``SO_REUSEADDR``)."""
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        listening.shutdown(socket.SHUT_RD)


def handed_down(ports: Mapping[str, HeldPort]) -> tuple[dict[str, str], tuple[int, ...]]:
    """What a child's environment says about the sockets that it inherits, and their descriptors."""
    given = {name: port.socket.fileno() for name, port in ports.items() if port.socket is not None}
    if not given:
        return {}, ()
    listed = ",".join(f"{name}={descriptor}" for name, descriptor in given.items())
    return {_INHERITED: listed}, tuple(given.values())


def inherited(name: str, host: str, port: int, environment: MutableMapping[str, str]) -> socket.socket | None:
    """The socket by this name that the parent holds, if it is bound to this very address. Each is taken once, and
    nothing that this process starts inherits it."""
    given = dict(part.split("=", 1) for part in environment.get(_INHERITED, "").split(",") if "=" in part)
    descriptor = given.pop(name, "")
    environment[_INHERITED] = ",".join(f"{each}={left}" for each, left in given.items())
    if not given:
        del environment[_INHERITED]
    number = whole_number(descriptor, 0, _MOST_DESCRIPTORS)
    if number is None:
        return None
    os.set_inheritable(number, False)
    found = socket.socket(fileno=number)
    if found.getsockname() != (host, port):
        found.close()
        return None
    # Connections that it accepts must not be in the way when it listens again.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return found


def _free_port() -> int:
    """A port that the kernel chose is let go when its socket stops listening; one that was asked for is kept."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
