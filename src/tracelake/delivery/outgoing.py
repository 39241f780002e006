"""The messages at hand, and which may be tried next: pure bookkeeping, by a clock that the caller brings.

Messages of one order key are tried one at a time, in the order of their ids, and so are messages of one record,
whose revisions may have different keys; one that waits for another try holds up those behind it, and no others. So
a row and its retraction can't overtake each other, nor can rows of one key.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from tracelake.contracts.deliveries import DeliveryMessage


@dataclass(slots=True)
class _Pending:
    message: DeliveryMessage
    due: float
    tries: int
    under_way: bool = False

    @property
    def lines(self) -> tuple[str, ...]:
        message = self.message
        # Without a key the order is the record's.
        both = (message.order_key, message.record_id)
        return both[:1] if both[0] == both[1] else both


class Outgoing:
    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._lines: dict[str, list[int]] = {}
        self._due: list[tuple[float, int]] = []
        self._busy: set[str] = set()
        """Lines with a message under way: one at most."""
        self._under_way = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def under_way(self) -> int:
        return self._under_way

    def message_ids(self) -> list[int]:
        return list(self._pending)

    def add(self, messages: Iterable[DeliveryMessage], now: float) -> None:
        """A message that is known already is left as it is."""
        for message in messages:
            if message.message_id in self._pending:
                continue
            pending = _Pending(message, now + message.wait_seconds, message.tries)
            self._pending[message.message_id] = pending
            for name in pending.lines:
                # Mostly at the end; a replayed message is older than those that wait.
                bisect.insort(self._lines.setdefault(name, []), message.message_id)
            self._offer(pending.lines)

    def take(self, limit: int, now: float) -> list[DeliveryMessage]:
        """Up to ``limit`` messages that are due; each counts as under way from here on."""
        taken: list[DeliveryMessage] = []
        while self._due and len(taken) < limit and self._due[0][0] <= now:
            due, message_id = heapq.heappop(self._due)
            pending = self._pending.get(message_id)
            # Entries are never removed when their message moves: the others are checked here.
            if pending is None or pending.due != due:
                continue
            if any(name in self._busy or self._lines[name][0] != message_id for name in pending.lines):
                # Offered again once the line that holds it back goes on.
                continue
            pending.under_way = True
            self._under_way += 1
            self._busy.update(pending.lines)
            taken.append(pending.message)
        return taken

    def next_due(self) -> float | None:
        return self._due[0][0] if self._due else None

    def tries(self, message_id: int) -> int:
        return self._pending[message_id].tries

    def again(self, message_id: int, due: float, *, counts: bool = True) -> None:
        """The try is over, and another follows."""
        pending = self._ended(message_id)
        if pending is None:
            return
        pending.due = due
        pending.tries += counts
        self._offer(pending.lines)

    def hurry(self, now: float) -> None:
        """What waits for another try needn't wait any longer."""
        for pending in self._pending.values():
            pending.due = min(pending.due, now)
        self._offer(self._lines)

    def done(self, message_id: int) -> None:
        """There is no further try."""
        pending = self._ended(message_id)
        if pending is not None:
            self._remove(pending)

    def drop(self, message_ids: Iterable[int]) -> None:
        """Forget messages; one whose try is under way is kept until that is over."""
        for message_id in message_ids:
            pending = self._pending.get(message_id)
            if pending is not None and not pending.under_way:
                self._remove(pending)

    def _ended(self, message_id: int) -> _Pending | None:
        pending = self._pending.get(message_id)
        if pending is not None and pending.under_way:
            pending.under_way = False
            self._under_way -= 1
            self._busy.difference_update(pending.lines)
        return pending

    def _remove(self, pending: _Pending) -> None:
        message_id = pending.message.message_id
        del self._pending[message_id]
        for name in pending.lines:
            line = self._lines[name]
            line.remove(message_id)
            if not line:
                del self._lines[name]
        self._offer(pending.lines)

    def _offer(self, names: Iterable[str]) -> None:
        """The first of each line may be due."""
        for name in names:
            if name in self._lines and name not in self._busy:
                first = self._lines[name][0]
                heapq.heappush(self._due, (self._pending[first].due, first))
