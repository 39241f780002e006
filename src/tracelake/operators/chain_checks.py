"""Checks of stored blocks and rows against each other; ``ChainFinding`` is a problem with a range of blocks.

``known_blocks`` checks the blocks of a span: all there, once, each the child of the one before. ``RowsCheck``
checks the rows of another table against them: each belongs to a stored block, none is missing and none is there
twice. Rows come sorted by block and position, in batches, and aren't kept: there are a few numbers per block.
Positions that rise prove that no row is there twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.domain.block_range import BlockRange
from tracelake.evm.profiles.registry import profile_of

Numbers = npt.NDArray[np.int64]
COLUMNS = ("block_number", "block_hash", "parent_hash")
COUNT = "transaction_count"
"""Checked if the blocks have it."""
CHAIN = "chain_id"
"""Decides whether transactions may be without a receipt, if the blocks have it."""
NOT_A_CHILD = "is not the child of the block before it"
NOT_THE_PARENT = "is not the parent of the block after it"
POSITIONS = {
    "transactions": "transaction_index",
    "receipts": "transaction_index",
    "logs": "log_index",
}
"""The column that counts a block's rows from 0, by table."""


@dataclass(frozen=True, slots=True, order=True)
class ChainFinding:
    """A problem of blocks ``start`` to ``end``, both inclusive."""

    start: int
    end: int
    what: str

    def __str__(self) -> str:
        blocks = f"block {self.start}" if self.start == self.end else f"blocks {self.start} to {self.end}"
        return f"{blocks}: {self.what}"


def merge_findings(findings: Iterable[ChainFinding]) -> list[ChainFinding]:
    """Neighbouring blocks with the same problem become one finding."""
    result: list[ChainFinding] = []
    for finding in sorted(findings, key=lambda found: (found.what, found.start, found.end)):
        last = result[-1] if result else None
        if last is not None and last.what == finding.what and finding.start <= last.end + 1:
            result[-1] = ChainFinding(last.start, max(last.end, finding.end), last.what)
        else:
            result.append(finding)
    return sorted(result)


def finding_ranges(findings: Iterable[ChainFinding]) -> list[BlockRange]:
    """The blocks that anything is wrong with, as few ranges as possible."""
    result: list[BlockRange] = []
    for finding in sorted(findings):
        if result and finding.start <= result[-1].end + 1:
            result[-1] = BlockRange(result[-1].start, max(result[-1].end, finding.end))
        else:
            result.append(BlockRange(finding.start, finding.end))
    return result


class SpanEdge(NamedTuple):
    """The hashes that join a span to its neighbours; empty if the block is missing."""

    start: int
    end: int
    first_parent: str
    last_hash: str
    first_hash: str = ""


@dataclass(frozen=True, slots=True)
class KnownBlocks:
    """The blocks of a span by number, which rows of other tables are checked against.

    ``hashes`` is null where a block is missing. ``may_lack_receipts``: on this chain some transactions have no
    receipt.
    """

    start: int
    hashes: pa.Array
    transaction_counts: Numbers | None
    edge: SpanEdge
    may_lack_receipts: bool = False


def known_blocks(rows: pa.Table, start: int, end: int) -> tuple[KnownBlocks, list[ChainFinding]]:
    """``rows`` has ``COLUMNS`` and perhaps ``COUNT`` and ``CHAIN``, of blocks within the span, in any order."""
    numbers: Numbers = rows.column("block_number").to_numpy().astype(np.int64) - start
    size = end - start + 1
    times = np.bincount(numbers, minlength=size)
    # A block that is there twice is wrong anyway; it doesn't matter which of the two is kept.
    place = np.full(size, -1, dtype=np.int64)
    place[numbers] = np.arange(len(numbers))
    rows_by_block = pa.array(place, mask=place < 0)
    hashes = _taken(rows.column("block_hash"), rows_by_block)
    parents = _taken(rows.column("parent_hash"), rows_by_block)
    counts = None
    if COUNT in rows.column_names:
        counted = _taken(rows.column(COUNT), rows_by_block)
        counts = np.asarray(pc.fill_null(counted, -1).to_numpy(zero_copy_only=False), dtype=np.int64)
    findings = [
        *_each(start, times == 0, "is missing"),
        *_each(start, times > 1, "is stored more than once"),
        *_each(start, (times > 0) & _nulls(hashes), "has no hash"),
        *_unlinked(start, hashes, parents),
    ]
    edge = SpanEdge(start, end, _hex(parents[0]), _hex(hashes[-1]), _hex(hashes[0]))
    return KnownBlocks(start, hashes, counts, edge, _may_lack_receipts(rows)), merge_findings(findings)


def _may_lack_receipts(rows: pa.Table) -> bool:
    if CHAIN not in rows.column_names or not rows.num_rows:
        return False
    return profile_of(None, rows.column(CHAIN)[0].as_py()).may_lack_receipts


def unjoined(spans: Iterable[SpanEdge]) -> list[ChainFinding]:
    """Spans that follow one another: is the first block of each the child of the last before it?"""
    return [
        ChainFinding(after.start, after.start, NOT_A_CHILD)
        for before, after in pairwise(sorted(spans))
        if before.last_hash and after.first_parent and before.end + 1 == after.start
        if before.last_hash != after.first_parent
    ]


def broken_seam(rows: pa.Table, upper: int, *, lower_is_newer: bool = False) -> ChainFinding | None:
    """Whether block ``upper`` is the child of the block before it, if both are among ``rows``; the finding is about
    the newer of the two."""
    by_number = {row["block_number"]: row for row in rows.select(COLUMNS).to_pylist()}
    below, above = by_number.get(upper - 1), by_number.get(upper)
    if below is None or above is None or above["parent_hash"] == below["block_hash"]:
        return None
    if lower_is_newer:
        return ChainFinding(upper - 1, upper - 1, NOT_THE_PARENT)
    return ChainFinding(upper, upper, NOT_A_CHILD)


def _unlinked(start: int, hashes: pa.Array, parents: pa.Array) -> Iterator[ChainFinding]:
    if len(hashes) < 2:
        return
    linked = pc.equal(parents.slice(1), hashes.slice(0, len(hashes) - 1))
    # A missing block is reported as missing, not as a broken link too.
    broken = pc.fill_null(pc.invert(linked), False).to_numpy(zero_copy_only=False)
    yield from _each(start + 1, broken, NOT_A_CHILD)


def _each(start: int, wrong: npt.NDArray[np.bool_], what: str) -> Iterator[ChainFinding]:
    for offset in np.flatnonzero(wrong):
        yield ChainFinding(start + int(offset), start + int(offset), what)


def _hex(value: pa.BinaryScalar) -> str:
    return "0x" + value.as_py().hex() if value.is_valid else ""


def _taken(column: pa.ChunkedArray, places: pa.Array) -> pa.Array:
    taken = column.combine_chunks().take(places)
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


def _nulls(values: pa.Array) -> npt.NDArray[np.bool_]:
    nulls: npt.NDArray[np.bool_] = values.is_null().to_numpy(zero_copy_only=False)
    return nulls


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
        # Rows of a missing block have no hash to compare with, and count as another block's.
        same = pc.fill_null(pc.equal(_array(batch.column("block_hash")), expected), False)
        self._foreign[blocks[~same.to_numpy(zero_copy_only=False)]] = True
        if self._position is None:
            return
        positions: Numbers = batch.column(self._position).to_numpy(zero_copy_only=False).astype(np.int64)
        # ``at``, because a block has several rows, and plain indexing would keep only one of them.
        np.maximum.at(self._highest, blocks, positions)
        # Block and position as one number, so that one comparison checks the order of both.
        self._see_keys((blocks << 32) + positions)

    def findings(self) -> list[ChainFinding]:
        return merge_findings(self._found())

    def _found(self) -> Iterator[ChainFinding]:
        yield from self._each(self._foreign, f"has {self._table} of another block hash")
        counts, sparse = self._known.transaction_counts, self._is_sparse
        if self._position is not None:
            yield from self._each(
                self._highest < self._counts - 1 if sparse else self._highest != self._counts - 1,
                f"has {self._table} that aren't numbered from 0 without gaps",
            )
            yield from self._each(self._twice, f"has {self._table} that are stored more than once")
        if counts is not None and self._table in ("transactions", "receipts"):
            # A missing block has no count, and is reported as missing already.
            known = counts >= 0
            yield from self._each(
                known & ((counts <= self._highest) if sparse else (counts != self._counts)),
                f"has another number of {self._table} than its transaction_count",
            )

    @property
    def _is_sparse(self) -> bool:
        return self._table == "receipts" and self._known.may_lack_receipts

    def _see_keys(self, keys: Numbers) -> None:
        # The last key of the batch before: a row may be there twice across two batches.
        before = np.concatenate([[self._last], keys[:-1]])
        self._twice[keys[keys <= before] >> 32] = True
        self._last = int(keys[-1])

    def _each(self, wrong: npt.NDArray[np.bool_], what: str) -> Iterator[ChainFinding]:
        for offset in np.flatnonzero(wrong):
            block = self._known.start + int(offset)
            yield ChainFinding(block, block, what)


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
