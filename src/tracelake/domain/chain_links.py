"""Links between neighbouring partitions of a chain: block N + 1's parent is block N, also across partitions.

A ``Seam`` is where two partitions meet. One that doesn't hold means that one of the two was read from a fork that
the chain has left, or from an endpoint that lies; which one can't be known from the hashes. So the newer one is
invalidated and made again. If it comes back with the same contradiction, the older one is made again. If that
doesn't help either, the endpoints themselves contradict each other, and the completion is refused for a person to
look at. Each of the two is made again once per contradiction, so this ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.domain.events import InvalidationScope

UNLINKED = "PartitionUnlinked"


@dataclass(frozen=True, slots=True)
class ChainSpan:
    """A partition of a chain: ``parent`` is the hash that its first block names as its parent's, ``last`` that of
    its last block."""

    range: BlockRange
    parent: str
    last: str


@dataclass(frozen=True, slots=True)
class Seam:
    """``upper`` begins where ``lower`` ends."""

    lower: ChainSpan
    upper: ChainSpan

    @property
    def holds(self) -> bool:
        return self.upper.parent == self.lower.last

    def __str__(self) -> str:
        return (
            f"block {self.upper.range.start} names {self.upper.parent} as its parent, "
            f"but block {self.lower.range.end} is {self.lower.last}"
        )

    def other(self, span: ChainSpan) -> ChainSpan:
        return self.lower if span == self.upper else self.upper

    def invalidation(self, span: ChainSpan) -> InvalidationScope:
        """The invalidation of one of the two; the same whenever the same contradiction is found."""
        key = f"{span.range.partition_key}/{self.upper.range.start}/{self.lower.last}/{self.upper.parent}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:40]
        return InvalidationScope(span.range, f"unlinked-{digest}", f"unlinked: {self}")


def broken_seams(span: ChainSpan, neighbours: Sequence[ChainSpan]) -> list[Seam]:
    seams = []
    for other in neighbours:
        if other.range.end + 1 == span.range.start:
            seams.append(Seam(other, span))
        elif span.range.end + 1 == other.range.start:
            seams.append(Seam(span, other))
    return [seam for seam in seams if not seam.holds]


def decide_unlinked(
    newer: ChainSpan, broken: Sequence[Seam], known: Collection[str]
) -> list[InvalidationScope]:
    """The invalidations by which broken seams of ``newer`` are mended; ``known`` are the ids of those that were
    applied before. Raises ``Invalid`` when both sides of a seam were made again already."""
    for seam in broken:
        if (own := seam.invalidation(newer)).id not in known:
            return [own]
    older = []
    for seam in broken:
        other = seam.invalidation(seam.other(newer))
        if other.id in known:
            raise Invalid(
                UNLINKED,
                f"{seam}; both {seam.lower.range.partition_key} and {seam.upper.range.partition_key} were made "
                f"again: check the endpoints of the RPC pool",
            )
        older.append(other)
    return older
