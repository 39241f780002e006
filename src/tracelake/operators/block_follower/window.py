"""The chain as it is stored: its last blocks in memory, the others in the data database, which is the truth.

What is in memory was read from there or committed by this attempt; whenever a commit's fate is unknown it is
read again. Blocks that are final may be missing, once their rows live in files alone; above them the stored
chain is whole, or ``reload`` says from where on it isn't.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from tracelake.domain.block_range import BlockRange
from tracelake.operators.block_follower.decide import BlockId, Link, linked

SIZE = 4096


class StoredBlocks(Protocol):
    """The hot table of blocks."""

    def span(self) -> BlockRange | None:
        """From the first to the last block that is stored; None when there is none."""
        ...

    def links(self, start: int, end: int) -> list[Link]:
        """Those that are stored, by number."""
        ...


class Window:
    def __init__(self, stored: StoredBlocks, size: int = SIZE) -> None:
        self._stored = stored
        self._size = size
        self._hashes: OrderedDict[int, bytes] = OrderedDict()
        self._first: int | None = None
        self._last: int | None = None

    @property
    def tip(self) -> BlockId | None:
        return None if self._last is None else BlockId(self._last, self._hashes[self._last])

    @property
    def first(self) -> int | None:
        """The lowest block that is stored."""
        return self._first

    def reload(self, final: int | None) -> int | None:
        """Read the last blocks from the database. Answers with the first of them, above what is ``final``,
        that doesn't continue the one before it, if there is one."""
        self._hashes.clear()
        span = self._stored.span()
        if span is None:
            self._first = self._last = None
            return None
        self._first, self._last = span.start, span.end
        links = self._stored.links(max(span.start, span.end - self._size + 1), span.end)
        self._keep(links)
        above = [link for link in links if final is None or link.number >= final]
        good = linked(None, above)
        return None if good == len(above) else above[good - 1].number + 1

    def resume(self, tip: BlockId) -> None:
        """Everything up to ``tip`` was stored, and is final: what of it isn't any more lives in files."""
        self._keep([Link(tip.number, tip.hash, b"")])
        self._first = tip.number if self._first is None else self._first
        self._last = tip.number

    def hash_at(self, number: int) -> bytes | None:
        """None when the block isn't stored."""
        if number in self._hashes:
            return self._hashes[number]
        if self._first is None or self._last is None or not self._first <= number <= self._last:
            return None
        found = self._stored.links(number, number)
        return found[0].hash if len(found) == 1 else None

    def extend(self, links: Sequence[Link]) -> None:
        """These were committed on top of the tip."""
        if links:
            self._keep(links)
            self._first = links[0].number if self._first is None else self._first
            self._last = links[-1].number

    def correct(self, links: Sequence[Link]) -> None:
        """These were committed in the place of what was stored there."""
        for link in links:
            if link.number in self._hashes:
                self._hashes[link.number] = link.hash

    def rewind(self, fork: int) -> None:
        """Everything above ``fork`` is gone."""
        if self._last is None or self._first is None or fork >= self._last:
            return
        for number in [number for number in self._hashes if number > fork]:
            del self._hashes[number]
        if fork < self._first:
            self._first = self._last = None
            return
        self._last = fork
        if fork not in self._hashes:
            self._keep(self._stored.links(max(self._first, fork - self._size + 1), fork))

    def _keep(self, links: Sequence[Link]) -> None:
        self._hashes.update((link.number, link.hash) for link in links)
        while len(self._hashes) > self._size:
            self._hashes.popitem(last=False)
