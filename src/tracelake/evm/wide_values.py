"""``wide_values``: numbers beyond the type of their column, exact, as one column of JSON of a table.

Chains are free to use numbers that no signed 64-bit integer holds: a gas limit of 2^64 − 1 for "none", a nonce of
2^64 − 3 for "has none", fees beyond 38 digits. The column itself is null in such a row, and ``wide_values`` has
``{"gas_limit": "18446744073709551615"}``; it is null in every other row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa

COLUMN = "wide_values"
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OTHER_NAMES = {"gas": "gas_limit"}


class WideValues:
    """The wide values of a table's rows, by row and column."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, int]] = {}

    def take_out(self, key: str, values: Sequence[Any], limit: int) -> list[Any]:
        """``values`` without those of ``limit`` and more, which are kept. All but None are valid numbers."""
        kept: list[Any] = []
        for row, value in enumerate(values):
            number = None if value is None else int(value, 16)
            if number is not None and number >= limit:
                self._rows.setdefault(row, {})[column_of(key)] = number
                value = None
            kept.append(value)
        return kept

    def adopt(self, others: WideValues, places: Iterable[int | None]) -> None:
        """Add the values of other rows. ``places`` are these rows' places among the others."""
        if not others._rows:
            return
        for row, place in enumerate(places):
            if place is not None and place in others._rows:
                self._rows.setdefault(row, {}).update(others._rows[place])

    def of_column(self, name: str) -> Mapping[int, int]:
        return {row: values[name] for row, values in self._rows.items() if name in values}

    def as_column(self, count: int) -> pa.Array:
        if not self._rows:
            return pa.nulls(count, pa.string())
        return pa.array([self._text(row) for row in range(count)], pa.string())

    def _text(self, row: int) -> str | None:
        values = self._rows.get(row)
        if values is None:
            return None
        return orjson.dumps({name: str(values[name]) for name in sorted(values)}).decode()


def column_of(key: str) -> str:
    """The column of a field of JSON-RPC: ``action.gasUsed`` is ``action_gas_used``."""
    return _OTHER_NAMES.get(key) or _WORD.sub("_", key).replace(".", "_").lower()
