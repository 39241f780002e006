"""How many calls an endpoint takes at once, learnt from what it says.

It begins small and doubles while all goes well. After a refusal it is halved, grows by a little now and then, and
stays below what was refused for a while: a limit of the provider doesn't go away, an overload does.
"""

from __future__ import annotations

FIRST = 16
_STEADY = 8
"""Batches in a row that go well before a size that was refused before is raised."""
_REMEMBERED = 600.0


class BatchSize:
    def __init__(self, most: int) -> None:
        self._most = most
        self._size = min(FIRST, most)
        self._well = 0
        self._refused: int | None = None
        self._refused_at = 0.0
        self._halved = False

    @property
    def size(self) -> int:
        return self._size

    def went_well(self, calls: int, now: float) -> None:
        if calls < self._size or self._size >= self._ceiling(now):
            return
        self._well += 1
        if not self._halved:
            self._size *= 2
        elif self._well >= _STEADY:
            self._well = 0
            self._size += max(1, self._size // 10)
        self._size = min(self._size, self._ceiling(now))

    def refused(self, calls: int, now: float, *, limit: bool) -> None:
        """``limit``: the endpoint said that it was too many, rather than not answering in time."""
        self._halved = True
        self._well = 0
        self._size = max(1, min(self._size, calls) // 2)
        if limit and calls > 1:
            self._refused = calls if self._refused is None else min(calls, self._refused)
            self._refused_at = now

    def _ceiling(self, now: float) -> int:
        if self._refused is not None and now - self._refused_at > _REMEMBERED:
            self._refused = None
        return self._most if self._refused is None else min(self._most, self._refused - 1)
