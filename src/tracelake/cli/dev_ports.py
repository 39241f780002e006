"""The ports of ``tracelake dev``: each by its own option, or all by one."""

from __future__ import annotations

from typing import NamedTuple

import typer

from tracelake.stack_address import INTERNAL_PORT, USER_PORT

AUTO = "auto"
_LAST = 65535


class ChosenPorts(NamedTuple):
    """0 is for any free one."""

    user: int = USER_PORT
    internal: int = INTERNAL_PORT
    query: int = 0


def chosen_ports(every: str | None, user: int | None, internal: int | None, query: int | None) -> ChosenPorts:
    """An option of its own comes before the one for all."""
    base = _base(every)
    return ChosenPorts(
        base.user if user is None else user,
        base.internal if internal is None else internal,
        base.query if query is None else query,
    )


def _base(every: str | None) -> ChosenPorts:
    if every is None:
        return ChosenPorts()
    if every == AUTO or every == "0":
        return ChosenPorts(0, 0, 0)
    if every.isascii() and every.isdigit() and 0 < int(every[:9]) <= _LAST - 2:
        first = int(every[:9])
        return ChosenPorts(first, first + 1, first + 2)
    raise typer.BadParameter(f"--port takes {AUTO}, or the first of three ports up to {_LAST}, not {every!r}")
