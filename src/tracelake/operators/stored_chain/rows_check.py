"""Rows of a table beside the blocks: each belongs to a stored block, none is missing and none is there twice.

Rows come sorted by block and position, in batches, and aren't kept: per block there are a few numbers. That they
rise proves that none is there twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.operators.stored_chain.blocks_check import KnownBlocks, Numbers
from tracelake.operators.stored_chain.finding import Finding, merged

POSITIONS = {
    "transactions": "transaction_index",
    "receipts": "transaction_index",
    "logs": "log_index",
}
"""The column that counts a block's rows from 0, by table."""


class RowsCheck:
    def __init__(self, table: str, known: KnownBlocks) -> None:
        self._table = table
        self._known = known
        self._position = POSITIONS.get(table)
        size = len(known.hashes)
        self._counts: Numbers = np.zeros(size, dtype=np.int64)
        self._highest: Numbers = np.full(size, -1, dtype=np.int64)
        self._foreign: npt.NDArray[np.bool_] = np.zeros(size, dtype=np.bool_)
        self._twice: npt.NDArray[np.bool_] = np.zeros(size, dtype=np.bool_)
        self._last = -1

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        if not batch.num_rows:
            return
        blocks: Numbers = batch.column("block_number").to_numpy(zero_copy_only=False) - self._known.start
        self._counts += np.bincount(blocks, minlength=len(self._counts))
        expected = self._known.hashes.take(pa.array(blocks))
        same = pc.fill_null(pc.equal(_array(batch.column("block_hash")), expected), False)
        self._foreign[blocks[~same.to_numpy(zero_copy_only=False)]] = True
        if self._position is None:
            return
        positions: Numbers = batch.column(self._position).to_numpy(zero_copy_only=False).astype(np.int64)
        np.maximum.at(self._highest, blocks, positions)
        self._see_keys((blocks << 32) + positions)

    def findings(self) -> list[Finding]:
        return merged(self._found())

    def _found(self) -> Iterator[Finding]:
        yield from self._each(self._foreign, f"has {self._table} of another block hash")
        if self._position is not None:
            yield from self._each(
                self._highest != self._counts - 1,
                f"has {self._table} that aren't numbered from 0 without gaps",
            )
            yield from self._each(self._twice, f"has {self._table} that are stored more than once")
        counts = self._known.transaction_counts
        if counts is not None and self._table in ("transactions", "receipts"):
            known = counts >= 0
            yield from self._each(
                known & (counts != self._counts), f"has another number of {self._table} than it says"
            )

    def _see_keys(self, keys: Numbers) -> None:
        before = np.concatenate([[self._last], keys[:-1]])
        self._twice[keys[keys <= before] >> 32] = True
        self._last = int(keys[-1])

    def _each(self, wrong: npt.NDArray[np.bool_], what: str) -> Iterator[Finding]:
        for offset in np.flatnonzero(wrong):
            block = self._known.start + int(offset)
            yield Finding(block, block, what)


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
