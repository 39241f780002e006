"""Numbers as JSON-RPC writes them: ``0x`` and hexadecimal digits.

No height, index or chain id is larger than what the database keeps. What is larger is a lie or a mistake, and would
only be in the way: Python itself refuses to print a number that is long enough.
"""

from __future__ import annotations

import re
from typing import Any

MOST = 2**63 - 1

_DIGITS = re.compile(r"0x[0-9a-fA-F]{1,16}")


def read_quantity(value: Any) -> int | None:
    """None for anything else than a number from 0 to ``MOST``."""
    if not isinstance(value, str) or _DIGITS.fullmatch(value) is None:
        return None
    number = int(value, 16)
    return number if number <= MOST else None
