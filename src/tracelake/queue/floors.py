"""Where in a queue's index a receive may start to look.

Between two vacuums, and for as long as somebody holds a snapshot, the front of the index is full of
entries of messages that are gone, and every receive would walk over all of them. A receiver that just
took a full batch knows that nothing older was left, so its next look starts there.

That is a hint and may be wrong: a message whose transaction was still open at the last look can turn up
below the floor. So the floor stays a little behind the clock (see the query), is dropped as soon as a
look finds less than it asked for, and never outlives a second without a look from the very front.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

FRONT = datetime(2000, 1, 1, tzinfo=UTC)
_LIFETIME_SECONDS = 1.0


class Floors:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._floors: dict[str, tuple[datetime, float]] = {}

    def of(self, queue: str) -> datetime:
        floor, expires = self._floors.get(queue, (FRONT, 0.0))
        return floor if self._monotonic() < expires else FRONT

    def drop(self, queue: str) -> None:
        self._floors.pop(queue, None)

    def raise_to(self, queue: str, floor: datetime, *, looked_from: datetime) -> None:
        """After a full batch; only a look from the front starts a new second."""
        if looked_from == FRONT:
            self._floors[queue] = floor, self._monotonic() + _LIFETIME_SECONDS
        elif queue in self._floors:
            self._floors[queue] = floor, self._floors[queue][1]
