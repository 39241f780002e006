"""Block ranges: inclusive on both ends, as files of chain data are usually named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Highest block number that fits a Postgres bigint with room for ``end + 1``.
MAX_BLOCK = 2**63 - 2


@dataclass(frozen=True, slots=True, order=True)
class BlockRange:
    """``[start, end]``, never empty, never negative."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= MAX_BLOCK:
            raise ValueError(f"not a block range: {self.start}-{self.end}")

    @property
    def partition_key(self) -> str:
        return f"{self.start}-{self.end}"

    @classmethod
    def parse(cls, partition_key: str) -> BlockRange:
        start, sep, end = partition_key.partition("-")
        # isdigit alone accepts digits of other scripts, and int() would read them.
        if not (sep and start.isascii() and start.isdigit() and end.isascii() and end.isdigit()):
            raise ValueError(f"not a partition key: {partition_key!r}")
        return cls(int(start), int(end))

    def overlaps(self, other: BlockRange) -> bool:
        return self.start <= other.end and other.start <= self.end

    def covers(self, other: BlockRange) -> bool:
        return self.start <= other.start and other.end <= self.end

    def split_on_grid(self, size: int, *, last_first: bool = False) -> Iterator[BlockRange]:
        """Cut at multiples of ``size``, so that a block is in the same chunk whatever the range is. Lazy, since
        there may be any number of chunks."""
        if size < 1:
            raise ValueError(f"not a chunk size: {size}")
        first, last = self.start // size, self.end // size
        for cell in range(last, first - 1, -1) if last_first else range(first, last + 1):
            yield BlockRange(max(self.start, cell * size), min(self.end, (cell + 1) * size - 1))
