"""A model of a chain: a number for each block, another one whenever the block is replaced."""

from __future__ import annotations

import random


class Chain:
    def __init__(self) -> None:
        self._forks = [0]
        self._next = 1

    @property
    def tip(self) -> int:
        return len(self._forks) - 1

    def content(self, block: int) -> str | None:
        return f"{block}.{self._forks[block]}" if 0 <= block <= self.tip else None

    def mine(self, blocks: int) -> None:
        self._forks += range(self._next, self._next + blocks)
        self._next += blocks

    def reorganize(self, depth: int, regrown: int) -> None:
        """The last ``depth`` blocks (never the first one) give way to ``regrown`` others, maybe fewer."""
        depth = min(depth, self.tip)
        del self._forks[len(self._forks) - depth :]
        self.mine(regrown)

    def evolve(self, rng: random.Random, *, reorganize: bool, longest: int) -> str:
        if reorganize and rng.random() < 0.4:
            depth, regrown = rng.randint(1, 6), rng.randint(0, 7)
            self.reorganize(depth, regrown)
            return f"reorganizes {depth} blocks, tip {self.tip}"
        if self.tip < longest:
            self.mine(rng.randint(1, 4))
        return f"grows, tip {self.tip}"
