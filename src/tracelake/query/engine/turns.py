"""Whose turn it is: callers take turns, and the queries of one caller wait for each other.

Nobody who asks much keeps the others waiting: one caller has at most a part of the places, the next free place goes
to the next caller in turn, and no caller fills the queue. Without a key a caller is bounded by the queue alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeAlias, TypeVar

from tracelake.domain.errors import Unavailable

T = TypeVar("T")
Key: TypeAlias = Hashable | None

_PARTS = 4


class Turns(Generic[T]):
    """``share`` is how many places one caller has at most, ``queue`` how many may wait."""

    def __init__(self, share: int, queue: int) -> None:
        self._share = share
        self._queue = queue
        self._of_one = max(1, queue // _PARTS)
        self._waiting: OrderedDict[Key, deque[asyncio.Future[T]]] = OrderedDict()
        self._running: Counter[Key] = Counter()
        self._count = 0

    def join(self, key: Key) -> asyncio.Future[T]:
        """Done with a place when it is the caller's turn."""
        if self._count >= self._queue:
            raise busy(f"{self._queue} queries are waiting already")
        own = self._waiting.get(key, ())
        if key is not None and len(own) >= self._of_one:
            raise busy(f"{self._of_one} of your queries are waiting already")
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._count += 1
        return turn

    def leave(self, key: Key, turn: asyncio.Future[T]) -> None:
        """Before it was the caller's turn."""
        self._waiting[key].remove(turn)
        self._forget(key)

    def next(self) -> asyncio.Future[T] | None:
        """The turn that a free place goes to, which counts as taken from here on."""
        for key, turns in self._waiting.items():
            if key is None or self._running[key] < self._share:
                turn = turns.popleft()
                self._waiting.move_to_end(key)
                self._forget(key)
                self._running[key] += 1
                return turn
        return None

    def done(self, key: Key) -> None:
        """A place is given back."""
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def refuse_all(self, why: Unavailable) -> None:
        for turns in self._waiting.values():
            for turn in turns:
                turn.set_exception(why)
        self._waiting.clear()
        self._count = 0

    def _forget(self, key: Key) -> None:
        self._count -= 1
        if not self._waiting[key]:
            del self._waiting[key]


def busy(why: str) -> Unavailable:
    return Unavailable("QueryServiceBusy", f"{why}; try again")
