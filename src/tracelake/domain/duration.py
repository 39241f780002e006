"""Durations as people write them: ``30s``, ``10m``, ``2h``, ``1d``."""

from __future__ import annotations

import re
from collections.abc import Collection

_DURATION = re.compile(r"([0-9]{1,9})(\.[0-9]{1,6})?(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_USUAL = ("s", "m", "h", "d")


def parse_duration(
    text: str, *, units: Collection[str] = _USUAL, bare: bool = False, fractions: bool = False
) -> float | None:
    """The seconds, or None for another text. ``bare``: a number without a unit is seconds; ``fractions``: ``1.5s``
    is allowed too."""
    matched = _DURATION.fullmatch(text)
    if matched is None or (matched[2] and not fractions):
        return None
    if matched[3] is None:
        return float(text) if bare else None
    return float(matched[1] + (matched[2] or "")) * _SECONDS[matched[3]] if matched[3] in units else None
