"""Settings of a process: numbers from its environment within bounds, and secrets that don't appear in logs.

``numbers_set`` reads the variables of a settings class. ``Secret`` hides its value in ``repr``, logs and
tracebacks; it is read by ``reveal`` alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, final

from tracelake.domain.errors import Invalid

_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")


def whole_number(text: str, least: float, most: float) -> int | None:
    """The whole number in ``text``, or None if it isn't one between the bounds; the text may be of any length."""
    if not _WHOLE.fullmatch(text.strip()):
        return None
    value = int(text)
    return value if least <= value <= most else None


def _number(text: str, least: float, most: float) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if least <= value <= most else None


def numbers_set(
    settings: object, bounds: Mapping[str, tuple[float, float]], environment: Mapping[str, str], prefix: str
) -> dict[str, Any]:
    """The numbers that ``environment`` sets as ``PREFIX_NAME``, by name. A number must be whole if it is one in
    ``settings``."""
    chosen: dict[str, Any] = {}
    for name, (least, most) in bounds.items():
        variable = f"{prefix}_{name.upper()}"
        if variable not in environment:
            continue
        whole = isinstance(getattr(settings, name), int)
        value = (whole_number if whole else _number)(environment[variable], least, most)
        if value is None:
            kind = "a whole number" if whole else "a number"
            raise Invalid("InvalidSetting", f"{variable} must be {kind} between {least:.10g} and {most:.10g}")
        chosen[name] = value
    return chosen


@final
class Secret:
    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"

    __str__ = __repr__
