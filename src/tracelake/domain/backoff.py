"""How long to wait before trying again: the delay doubles with each failure in a row, up to a limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

#: Keeps the power within a float; any ``longest`` is reached before.
_MOST_DOUBLINGS = 62


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays in seconds. ``first`` follows the first failure; no delay exceeds ``longest`` before jitter."""

    first: float
    longest: float

    def delay(self, failures: int, *, jitter: float = 1.0) -> float:
        """The delay after ``failures`` in a row, at least one. ``jitter`` is a factor; see ``spread``."""
        # Bounded before the power: a float overflows after about a thousand failures in a row.
        doublings = min(max(failures, 1) - 1, _MOST_DOUBLINGS)
        return min(self.longest, self.first * 2.0**doublings) * jitter

    def ladder(self) -> list[float]:
        """The delays in order up to the longest, which holds from there on; for counters kept elsewhere."""
        delays = [self.delay(1)]
        while delays[-1] < self.longest and len(delays) <= _MOST_DOUBLINGS:
            delays.append(self.delay(len(delays) + 1))
        return delays

    def counter(self) -> BackoffCounter:
        return BackoffCounter(self)


class BackoffCounter:
    """Counts failures in a row for one thing that is tried again and again."""

    __slots__ = ("_backoff", "failures")

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.failures = 0

    def failed(self, *, jitter: float = 1.0) -> float:
        """Record a failure; the result is the delay before the next attempt."""
        self.failures += 1
        return self._backoff.delay(self.failures, jitter=jitter)

    def succeeded(self) -> None:
        self.failures = 0


def spread(most: float = 1.5, draw: Callable[[], float] = random.random) -> float:
    """A random factor in [0.5, ``most``), so that clients that failed together don't come back together.

    ``most`` of 1 keeps within the delay. ``draw`` gives numbers in [0, 1); a simulation has its own.
    """
    return 0.5 + (most - 0.5) * draw()
