"""What happens to the chain: it grows, is reorganised, loses blocks, stays short for a while and grows again.

What was final stays: that is what finality means, and a follower that sees it broken stops for good. Whoever needs
the chain to do something at a certain moment takes it out of the weather's hands for that long.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tracelake.testing.anvil import Anvil
from tracelake.testing.anvil_chain import AnvilChain

_WEIGHTS = {"grow": 12, "grow_empty": 2, "reorg": 3, "shrink": 2}
_STAYS_SHORT = 4


class ChainWeather:
    def __init__(self, anvil: Anvil, seed: int, finality: int) -> None:
        self._anvil = anvil
        self._dice = random.Random(seed)
        self._finality = finality
        self._chain = AnvilChain(anvil, seed)
        self._highest = self._chain.grow(finality)
        self._quiet = 0
        self._held = threading.Lock()
        self.seen: Counter[str] = Counter()

    def next(self) -> None:
        """Nothing while somebody holds the chain."""
        if not self._held.acquire(blocking=False):
            return
        try:
            self._happen()
        finally:
            self._held.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """What follows is done by nobody else."""
        with self._held:
            yield

    @property
    def head(self) -> int:
        return self._anvil.head

    def grow(self, blocks: int) -> int:
        self._highest = max(self._highest, self._chain.grow(blocks))
        return self._highest

    def reorg(self, depth: int) -> bool:
        """Replace so many blocks, or as many as aren't final; False when that is none."""
        if (depth := min(depth, self._deepest)) < 1:
            return False
        self.seen["reorg"] += 1
        self.seen["deepest"] = max(self.seen["deepest"], depth)
        self._chain.reorg(depth)
        return True

    def bury(self) -> None:
        """What there is becomes final: no later reorg can put right what was missed of an earlier one."""
        self.grow(self._finality + 1)

    def settle(self, blocks: int) -> int:
        """Grow to so many blocks above all that there ever were, so that these become final; the head."""
        return self.grow(self._highest - self._anvil.head + blocks)

    @property
    def _deepest(self) -> int:
        # The contracts of the first block stay, too.
        return self._anvil.head - max(1, self._highest - self._finality)

    def _happen(self) -> None:
        if self._quiet:
            self._quiet -= 1
            return
        [name] = self._dice.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))
        deepest = self._deepest
        if name in ("reorg", "shrink") and deepest >= 1:
            depth = self._dice.randint(1, deepest)
            if name == "reorg":
                self.reorg(depth)
            else:
                self._anvil.rollback(depth)
                self._quiet = self._dice.choice((0, _STAYS_SHORT))
                self.seen["shrink"] += 1
        elif name == "grow_empty":
            self._highest = max(self._highest, self._anvil.mine(self._dice.randint(1, 4)))
            self.seen["grow_empty"] += 1
        else:
            self.grow(self._dice.randint(1, 3))
            self.seen["grow"] += 1
