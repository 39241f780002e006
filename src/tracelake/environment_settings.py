"""Numbers of a process's settings that its environment may set, each within its bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tracelake.domain.errors import Invalid

_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")


def whole_number(text: str, least: float, most: float) -> int | None:
    """None for what is no whole number between these two, as people write one, however long it is."""
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
    """By name, those that ``environment`` has as ``PREFIX_NAME``. Whole numbers are those that ``settings`` has as
    such."""
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
