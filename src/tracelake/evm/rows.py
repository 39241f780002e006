"""JSON objects of one kind out of many blocks, read field by field into columns.

A field that can't be read is reported with the block, the endpoint that gave it and its place in the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from tracelake.evm import hex_columns
from tracelake.evm.bad_value import BadValue
from tracelake.evm.block_errors import BlockMalformed
from tracelake.evm.raw_block import RawBlock

Convert = Callable[[Sequence[Any]], Any]

HASH: Convert = partial(hex_columns.fixed_bytes, width=32)
ADDRESS: Convert = partial(hex_columns.fixed_bytes, width=20)
BLOOM: Convert = partial(hex_columns.fixed_bytes, width=256)


class Rows:
    """``lists`` has one list of objects for each block; ``what`` names them in errors, as JSON-RPC does."""

    def __init__(self, blocks: Sequence[RawBlock], lists: Sequence[Any], what: str) -> None:
        self._blocks, self._lists, self._what = blocks, lists, what
        for raw, objects in zip(blocks, lists, strict=True):
            if not isinstance(objects, list) or not set(map(type, objects)) <= {dict}:
                raise BlockMalformed(raw.number, raw.endpoint, what or "the block", "isn't a list of objects")
        self.counts = np.fromiter(map(len, lists), np.int64, len(lists))
        self.objects: list[dict[str, Any]] = list(chain.from_iterable(lists))

    def __len__(self) -> int:
        return len(self.objects)

    def column(self, key: str, convert: Convert) -> Any:
        """A field that every object has."""
        values = self.values(key)
        if not all(values) and None in values:
            raise self._malformed(key, values.index(None), "is missing")
        return self.convert(key, values, convert)

    def optional(self, key: str, convert: Convert) -> Any:
        """A field that may be absent or null."""
        return self.convert(key, self.values(key), convert)

    def values(self, key: str) -> list[Any]:
        try:
            return list(map(itemgetter(key), self.objects))
        except KeyError:
            return [item.get(key) for item in self.objects]

    def convert(self, key: str, values: Sequence[Any], convert: Convert) -> Any:
        """Values that were taken out of the objects by hand, one for each."""
        try:
            return convert(values)
        except BadValue as bad:
            there = [index for index, value in enumerate(values) if value is not None]
            raise self._malformed(key, there[bad.index], bad.problem) from None

    def per_row(self, per_block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What is said once for each block, said for each object."""
        return np.repeat(per_block, self.counts, axis=0)

    def _malformed(self, key: str, index: int, problem: str) -> BlockMalformed:
        block = int(np.searchsorted(np.cumsum(self.counts), index, side="right"))
        raw = self._blocks[block]
        place = index - int(self.counts[:block].sum())
        field = f"{self._what}[{place}].{key}" if self._what else key
        return BlockMalformed(raw.number, raw.endpoint, field, problem)
