"""The chain as endpoints have it and as it is stored, and the last block that is final.

``ChainView`` asks the endpoints, which don't always have the same chain. ``ChainWindow`` is the stored chain: its
last blocks in memory, the others in the data database, which is the truth. Blocks in memory were read from there
or committed by this attempt; they are read again whenever the outcome of a commit is unknown. Final blocks may be
missing once their rows are in files alone; above them the stored chain is whole, or ``reload`` returns where it
breaks.

``Finality`` is the last stored block that the chain has promised to keep. With ``finality: N`` that is N blocks
below the highest tip there was; with ``finalized`` it is the block that the endpoints name, if the stored block
has the same hash. It only ever rises: a chain that goes back behind it is not followed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Unavailable
from tracelake.evm.raw_block import RawBlock
from tracelake.evm.rpc.pool import Pool
from tracelake.operators.block_follower.decide import BlockId, BlockLink, count_linked

SIZE = 4096
EVERY_SECONDS = 2.0
COLUMNS = ("block_number", "block_hash", "parent_hash")


class ChainView:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._furthest = ""
        self.head_time: int | None = None
        """The timestamp of the head that was seen last."""

    def head(self) -> BlockId:
        """The head of the endpoint that is furthest."""
        seen = self._pool.head()
        self._furthest = seen.endpoint
        self.head_time = seen.timestamp
        return block_id(seen.number, seen.hash)

    def hash_at(self, number: int) -> bytes | None:
        """The hash that one of the endpoints has; None only if all agree that there is no such block."""
        return hash_of(self._pool.header(number))

    def hashes_at(self, number: int) -> dict[str, bytes | None]:
        """The hash of each endpoint at this height."""
        return {name: hash_of(header) for name, header in self._pool.headers_by_endpoint(number).items()}

    def prefer_furthest(self, height: int, kept: BlockId | None) -> None:
        """Endpoints that have another block at ``height`` than the furthest are asked last from now on, so that
        one which is stuck on an abandoned fork blocks nothing; unless the furthest itself doesn't have ``kept``.
        """
        # An endpoint that has lost a final block must not lead, however far it is.
        if kept is not None and self.hashes_at(kept.number).get(self._furthest) != kept.hash:
            return
        found = self.hashes_at(height)
        leading = found.get(self._furthest)
        for name, other in found.items():
            if leading is not None and other is not None and other != leading:
                self._pool.distrust(
                    name, f"has another block {height} than {self._furthest}, which has a higher head"
                )


class StoredBlocks(Protocol):
    """The hot table of blocks."""

    def span(self) -> BlockRange | None:
        """From the first to the last block that is stored; None when there is none."""
        ...

    def links(self, start: int, end: int) -> list[BlockLink]:
        """The stored blocks of this range, by number."""
        ...


class ChainWindow:
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
        """Read the last blocks from the database. Returns the first of them above ``final`` that doesn't continue
        the one before it, if there is one."""
        self._hashes.clear()
        span = self._stored.span()
        if span is None:
            self._first = self._last = None
            return None
        self._first, self._last = span.start, span.end
        links = self._stored.links(max(span.start, span.end - self._size + 1), span.end)
        self._keep(links)
        above = [link for link in links if final is None or link.number >= final]
        good = count_linked(None, above)
        return None if good == len(above) else above[good - 1].number + 1

    def resume(self, tip: BlockId) -> None:
        """Go on above ``tip``, which is final. Blocks up to there that aren't stored any more are in files."""
        # Its parent isn't needed: the chain never goes back behind a final block.
        self._keep([BlockLink(tip.number, tip.hash, b"")])
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

    def extend(self, links: Sequence[BlockLink]) -> None:
        """These were committed on top of the tip."""
        if links:
            self._keep(links)
            self._first = links[0].number if self._first is None else self._first
            self._last = links[-1].number

    def correct(self, links: Sequence[BlockLink]) -> None:
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
        # Nothing that is stored belongs to the chain any more.
        if fork < self._first:
            self._first = self._last = None
            return
        self._last = fork
        if fork not in self._hashes:
            self._keep(self._stored.links(max(self._first, fork - self._size + 1), fork))

    def _keep(self, links: Sequence[BlockLink]) -> None:
        self._hashes.update((link.number, link.hash) for link in links)
        # The oldest first: forks are found near the tip.
        while len(self._hashes) > self._size:
            self._hashes.popitem(last=False)


class Finality:
    def __init__(
        self,
        pool: Pool,
        depth: int | None,
        known: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``known`` is the block that was final before this attempt."""
        self._pool = pool
        self._depth = depth
        self._clock = clock
        self._asked_at: float | None = None
        self.final = known
        self.is_known = True
        """False when no endpoint knows what is finalized."""

    def reached(self, first: int, tip: int) -> int | None:
        """The block that will be final once ``tip`` is stored; blocks below ``first`` don't count."""
        if self._depth is None:
            return None if self.final is None else min(self.final, tip)
        depth = tip - self._depth
        final = max(-1 if self.final is None else self.final, depth)
        return min(final, tip) if final >= first else self.final

    def stored(self, first: int, tip: int) -> None:
        """``tip`` is stored now."""
        if self._depth is not None:
            reached = self.reached(first, tip)
            if reached is not None and (self.final is None or reached > self.final):
                self.final = reached

    def ask(self, first: int, tip: BlockId, hash_at: Callable[[int], bytes | None]) -> bool:
        """Ask the endpoints, at most every ``EVERY_SECONDS``; True when more is final than before."""
        now = self._clock()
        if self._depth is not None or (self._asked_at is not None and now - self._asked_at < EVERY_SECONDS):
            return False
        # Before the call, so that endpoints that fail aren't asked in every step.
        self._asked_at = now
        reported = self._pool.finalized()
        self.is_known = reported is not None
        if reported is None:
            return False
        # The endpoints may be ahead of the stored blocks.
        number = min(reported, tip.number)
        if number < first or (self.final is not None and number <= self.final):
            return False
        # An endpoint on another fork may call a block final that isn't ours.
        ours = hash_at(number)
        if ours is None or ours != hash_of(self._pool.header(number)):
            return False
        self.final = number
        return True


def link_of_block(raw: RawBlock) -> BlockLink:
    return BlockLink(raw.number, raw_bytes(raw.block, "hash"), raw_bytes(raw.block, "parentHash"))


def links_of_rows(rows: pa.Table) -> list[BlockLink]:
    """Of a table with ``COLUMNS``, in the order of the blocks."""
    columns = [rows.column(name).to_pylist() for name in COLUMNS] if rows.num_rows else [[], [], []]
    return sorted((BlockLink(*row) for row in zip(*columns, strict=True)), key=lambda link: link.number)


def hash_of(header: Mapping[str, Any] | None) -> bytes | None:
    return None if header is None else raw_bytes(header, "hash")


def block_id(number: int, hash_text: str) -> BlockId:
    return BlockId(number, bytes.fromhex(hash_text[2:]))


def raw_bytes(header: Mapping[str, Any], field: str) -> bytes:
    try:
        return bytes.fromhex(header[field][2:])
    except (KeyError, TypeError, ValueError):
        raise Unavailable(
            "BadHeader", f"an endpoint answered with a block without a usable {field}"
        ) from None
