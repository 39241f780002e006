"""When to look at the head again: often when a block is due, seldom right after one has come.

A chain has a rhythm, which is learnt from the blocks that come. Looking ten times in a block's time finds a
block a twentieth of that late on average; most looks before half of the time are wasted, so there are none.
``longest`` is the longest wait: what a chain that stands still costs.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST = 0.02
_LEARN = 0.3
_QUIET = 0.5
_LOOKS = 10


@dataclass(slots=True)
class Rhythm:
    longest: float
    _interval: float | None = None
    _last: float | None = None

    def saw(self, blocks: int, now: float) -> None:
        """So many new blocks have come since the last time."""
        if self._last is not None and blocks > 0:
            took = (now - self._last) / blocks
            old = took if self._interval is None else self._interval
            self._interval = old + _LEARN * (took - old)
        self._last = now

    def wait(self, now: float) -> float:
        """Seconds until the next look."""
        if self._interval is None or self._last is None:
            return _clamp(self.longest / _LOOKS, self.longest)
        since = now - self._last
        look = self._interval / _LOOKS
        return _clamp(max(look, self._interval * _QUIET - since), self.longest)


def _clamp(seconds: float, longest: float) -> float:
    return min(longest, max(SHORTEST, seconds))
