"""The stored blocks of a span, checked against themselves: all there, once, each the child of the one before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.operators.stored_chain.finding import Finding, merged

Numbers = npt.NDArray[np.int64]
COLUMNS = ("block_number", "block_hash", "parent_hash")
COUNT = "transaction_count"
"""Checked where the blocks say it."""
NOT_A_CHILD = "is not the child of the block before it"


class SpanEdge(NamedTuple):
    """What joins a span to its neighbours; empty where the block is missing."""

    start: int
    end: int
    first_parent: str
    last_hash: str


@dataclass(frozen=True, slots=True)
class KnownBlocks:
    """The blocks of a span by number: what rows of other tables are checked against.

    ``hashes`` is null where a block is missing.
    """

    start: int
    hashes: pa.Array
    transaction_counts: Numbers | None
    edge: SpanEdge


def known_blocks(rows: pa.Table, start: int, end: int) -> tuple[KnownBlocks, list[Finding]]:
    """``rows`` has ``COLUMNS`` and perhaps ``COUNT``, of blocks within the span, in any order."""
    numbers: Numbers = rows.column("block_number").to_numpy().astype(np.int64) - start
    size = end - start + 1
    times = np.bincount(numbers, minlength=size)
    # A block that is there twice is one that is wrong; which of the two is kept doesn't matter.
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
    edge = SpanEdge(start, end, _hex(parents[0]), _hex(hashes[-1]))
    return KnownBlocks(start, hashes, counts, edge), merged(findings)


def unjoined(spans: Iterable[SpanEdge]) -> list[Finding]:
    """Spans that follow one another: is the first block of each the child of the last before it?"""
    return [
        Finding(after.start, after.start, NOT_A_CHILD)
        for before, after in pairwise(sorted(spans))
        if before.last_hash and after.first_parent and before.end + 1 == after.start
        if before.last_hash != after.first_parent
    ]


def _unlinked(start: int, hashes: pa.Array, parents: pa.Array) -> Iterator[Finding]:
    if len(hashes) < 2:
        return
    linked = pc.equal(parents.slice(1), hashes.slice(0, len(hashes) - 1))
    broken = pc.fill_null(pc.invert(linked), False).to_numpy(zero_copy_only=False)
    yield from _each(start + 1, broken, NOT_A_CHILD)


def _each(start: int, wrong: npt.NDArray[np.bool_], what: str) -> Iterator[Finding]:
    for offset in np.flatnonzero(wrong):
        yield Finding(start + int(offset), start + int(offset), what)


def _hex(value: pa.BinaryScalar) -> str:
    return "0x" + value.as_py().hex() if value.is_valid else ""


def _taken(column: pa.ChunkedArray, places: pa.Array) -> pa.Array:
    taken = column.combine_chunks().take(places)
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


def _nulls(values: pa.Array) -> npt.NDArray[np.bool_]:
    nulls: npt.NDArray[np.bool_] = values.is_null().to_numpy(zero_copy_only=False)
    return nulls
