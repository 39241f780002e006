"""What is final: the last stored block that the chain has promised to keep.

By ``finality: N`` that is N blocks below the highest tip there was; by ``finalized`` it is what the endpoints
say, if the block that they have there is the one that is stored. It only ever rises: a chain that takes it
back is not followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tracelake.evm.rpc.pool import Pool
from tracelake.operators.block_follower.decide import BlockId
from tracelake.operators.block_follower.links import hash_of

EVERY_SECONDS = 2.0


class Finality:
    def __init__(
        self,
        pool: Pool,
        depth: int | None,
        known: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``known`` is what was final before."""
        self._pool = pool
        self._depth = depth
        self._clock = clock
        self._asked_at: float | None = None
        self.final = known
        self.told = True
        """False when no endpoint knows what is finalized."""

    def reached(self, first: int, tip: int) -> int | None:
        """What will be final once ``tip`` is stored; nothing below ``first`` counts."""
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
        """Ask the endpoints, now and then; True when more is final than before."""
        now = self._clock()
        if self._depth is not None or (self._asked_at is not None and now - self._asked_at < EVERY_SECONDS):
            return False
        self._asked_at = now
        said = self._pool.finalized()
        self.told = said is not None
        if said is None:
            return False
        number = min(said, tip.number)
        if number < first or (self.final is not None and number <= self.final):
            return False
        ours = hash_at(number)
        if ours is None or ours != hash_of(self._pool.header(number)):
            return False
        self.final = number
        return True
