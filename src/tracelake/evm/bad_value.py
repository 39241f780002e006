"""Which value of a column is bad, and why: looked for only once a column was found to be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tracelake.evm.foreign_text import shown

_BYTES = re.compile(r"0x(?:[0-9a-fA-F]{2})*")
_QUANTITY = re.compile(r"0x[0-9a-fA-F]+")


class BadValue(ValueError):
    """The value at ``index`` of those that were given. ``problem`` reads well after the field's name."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index, self.problem = index, problem


def bad_bytes(values: Sequence[Any], width: int | None) -> BadValue:
    for index, value in enumerate(values):
        if not isinstance(value, str) or not _BYTES.fullmatch(value):
            return BadValue(index, f"isn't hexadecimal bytes: {shown(value)}")
        if width is not None and len(value) != 2 + 2 * width:
            return BadValue(index, f"has {len(value) // 2 - 1} bytes instead of {width}: {shown(value)}")
    return BadValue(0, "can't be read")


def bad_quantity(values: Sequence[Any], limit: int) -> BadValue:
    for index, value in enumerate(values):
        if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
            return BadValue(index, f"isn't a hexadecimal number: {shown(value)}")
        if int(value, 16) >= limit:
            return BadValue(index, f"is too large: {shown(value)}")
    return BadValue(0, "can't be read")
