"""The stack's ports, chosen before anything is started: so its parts can be told of each other and start together.

The supervisor holds each port for as long as the stack runs, and a part listens on the supervisor's own socket.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from tracelake.domain.errors import Conflict
from tracelake.held_port import LOOPBACK, HeldPort


class Ports:
    def __init__(self) -> None:
        self._held: dict[int, str] = {}
        self._ports: list[HeldPort] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._ports:
            each.close()

    def take(self, name: str, port: int) -> HeldPort:
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

    def take_or_any(self, name: str, port: int) -> HeldPort:
        """The one of the last time if it is still free."""
        try:
            return self._hold(name, 0 if port in self._held else port)
        except OSError:
            return self._hold(name, 0)

    def _hold(self, name: str, port: int) -> HeldPort:
        held = HeldPort(port)
        self._ports.append(held)
        self._held[held.number] = name
        return held
