"""Rows into row groups that are neither too long nor too heavy, cut by what the rows are, not by how they arrived.

A reader skips by row group, and a writer holds one in memory: long ones skip little, and a few thousand rows with
large payloads may weigh more than a million without. Cuts lie on a grid of ``STEP`` rows, and a step's weight is
that of its values; so the same rows make the same groups whatever batches brought them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

MAX_ROWS = 64 * 1024
MAX_WEIGHT = 64 * 1024 * 1024
STEP = 1024

_PLAIN_VALUE = 8


class RowGroups:
    def __init__(self, schema: pa.Schema, *, max_rows: int = MAX_ROWS, max_weight: int = MAX_WEIGHT) -> None:
        self._max_rows = max_rows
        self._max_weight = max_weight
        self._texts = [field.name for field in schema if _is_text(field.type)]
        self._plain = _PLAIN_VALUE * (len(schema) - len(self._texts))
        self._rows = schema.empty_table()
        self._weighed = 0
        self._weight = 0

    def add(self, rows: pa.Table) -> Iterator[pa.Table]:
        """The groups that are full now."""
        self._rows = pa.concat_tables([self._rows, rows]) if self._rows.num_rows else rows
        while self._weighed + STEP <= self._rows.num_rows:
            self._weight += self._weigh(self._rows.slice(self._weighed, STEP))
            self._weighed += STEP
            if self._weighed >= self._max_rows or self._weight >= self._max_weight:
                yield self._rows.slice(0, self._weighed)
                self._rows = self._rows.slice(self._weighed)
                self._weighed = self._weight = 0

    def rest(self) -> pa.Table:
        """What is left, once there is nothing more to come."""
        return self._rows

    def _weigh(self, step: pa.Table) -> int:
        weight: int = self._plain * step.num_rows
        for name in self._texts:
            weight += pc.sum(pc.binary_length(step.column(name))).as_py() or 0
        return weight


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_string(kind))
