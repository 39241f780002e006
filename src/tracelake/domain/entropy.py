"""The source of ids and jitter: one per process, so that a simulation can seed it."""

from __future__ import annotations

import random
import secrets
from uuid import UUID

from tracelake.domain.backoff import spread


class Entropy:
    """Random ids and jitter. With a seed they are the same in every run."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed) if seed is not None else secrets.SystemRandom()

    def uuid(self) -> UUID:
        return UUID(int=self._random.getrandbits(128), version=4)

    def jitter(self) -> float:
        """A factor in [0.5, 1.5) that spreads retries of things that failed together."""
        return spread(draw=self._random.random)
