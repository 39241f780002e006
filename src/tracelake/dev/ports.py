"""The stack's ports, chosen before anything is started: so its parts can be told of each other and start together.

Each is held by a socket that never listens, for as long as the stack runs: nobody is given the port by chance,
before its part listens on it or while that part is being started again. On Linux a listener may join a socket that
only holds; elsewhere it may not, and the port is let go at once.
"""

from __future__ import annotations

import socket
import sys
from types import TracebackType
from typing import Self

from tracelake.domain.errors import Conflict

LOOPBACK = "127.0.0.1"


class Ports:
    def __init__(self) -> None:
        self._held: dict[int, str] = {}
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._sockets:
            each.close()

    def take(self, name: str, port: int) -> int:
        """The one asked for by ``--NAME-port``, or any free one for 0; says what to do about one that is taken."""
        if port in self._held:
            raise Conflict(
                "PortTaken", f"port {port} can't be both the {self._held[port]} and the {name} port"
            )
        try:
            return self._hold(name, port)
        except OSError as error:
            raise Conflict(
                "PortTaken",
                f"the {name} port {LOOPBACK}:{port} can't be used ({error.strerror}): end what listens there, take "
                f"another with --{name}-port (0 for any free one), or free ones for everything with --port auto",
            ) from None

    def take_or_any(self, name: str, port: int) -> int:
        """The one of the last time if it is still free."""
        try:
            return self._hold(name, 0 if port in self._held else port)
        except OSError:
            return self._hold(name, 0)

    def _hold(self, name: str, port: int) -> int:
        holder = socket.socket()
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((LOOPBACK, port))
            found = int(holder.getsockname()[1])
        except BaseException:
            holder.close()
            raise
        if sys.platform == "linux":
            self._sockets.append(holder)
        else:
            holder.close()
        self._held[found] = name
        return found
