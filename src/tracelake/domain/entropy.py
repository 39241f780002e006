"""Where ids and jitter come from: one source per process, so that a simulation can seed it."""

from __future__ import annotations

import random
import secrets
from uuid import UUID


class Entropy:
    """Random ids and jitter. Seeded, it gives the same ones again."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed) if seed is not None else secrets.SystemRandom()

    def uuid(self) -> UUID:
        return UUID(int=self._random.getrandbits(128), version=4)

    def jitter(self) -> float:
        """A factor in [0.5, 1.5) that spreads retries of things that failed together."""
        return 0.5 + self._random.random()
