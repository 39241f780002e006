"""The messages at hand, and which may be tried next: pure bookkeeping, by a clock that the caller brings.

Messages of one order key are tried one at a time, in the order of their ids; one that waits for another try holds
up those behind it, and no others. So a row and its retraction can't overtake each other, nor can rows of one key.
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


class Outgoing:
    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._lines: dict[str, list[int]] = {}
        self._due: list[tuple[float, int]] = []
        self._busy: set[str] = set()
        """Order keys with a message under way: one at most, so their number is that of the messages."""

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def under_way(self) -> int:
        return len(self._busy)

    def add(self, messages: Iterable[DeliveryMessage], now: float) -> None:
        """A message that is known already is left as it is."""
        for message in messages:
            if message.message_id in self._pending:
                continue
            self._pending[message.message_id] = _Pending(message, now + message.wait_seconds, message.tries)
            line = self._lines.setdefault(message.order_key, [])
            # Mostly at the end; a replayed message is older than those that wait.
            bisect.insort(line, message.message_id)
            self._offer(line)

    def take(self, limit: int, now: float) -> list[DeliveryMessage]:
        """Up to ``limit`` messages that are due; each counts as under way from here on."""
        taken: list[DeliveryMessage] = []
        while self._due and len(taken) < limit and self._due[0][0] <= now:
            due, message_id = heapq.heappop(self._due)
            pending = self._pending.get(message_id)
            # Entries are never removed when their message moves: the others are checked here.
            if pending is None or pending.due != due:
                continue
            key = pending.message.order_key
            if key in self._busy or self._lines[key][0] != message_id:
                continue
            pending.under_way = True
            self._busy.add(key)
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
        self._offer(self._lines[pending.message.order_key])

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
            self._busy.discard(pending.message.order_key)
        return pending

    def _remove(self, pending: _Pending) -> None:
        message = pending.message
        del self._pending[message.message_id]
        line = self._lines[message.order_key]
        line.remove(message.message_id)
        if line:
            self._offer(line)
        else:
            del self._lines[message.order_key]

    def _offer(self, line: list[int]) -> None:
        head = self._pending[line[0]]
        if head.message.order_key not in self._busy:
            heapq.heappush(self._due, (head.due, line[0]))
