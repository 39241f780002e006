"""Numbers of a process's settings that its environment may set, each within its bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tracelake.domain.errors import Invalid


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
        try:
            value = int(environment[variable]) if whole else float(environment[variable])
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            kind = "a whole number" if whole else "a number"
            raise Invalid("InvalidSetting", f"{variable} must be {kind} between {least:.10g} and {most:.10g}")
        chosen[name] = value
    return chosen
