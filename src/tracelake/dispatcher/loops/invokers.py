"""Which invoker gets the next function: those that are there, less those known to be full or away.

An invoker is asked in as many calls at a time as it has slots. One that had no slot, or couldn't be reached, is
asked with a single call until it has taken something again: each call stands for a lease, and leases that wait at
a closed door help nobody. After it couldn't be reached it is left alone for a while, longer each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracelake.store.invokers import InvokerRow

AWAY_SECONDS = (1.0, 15.0)


@dataclass(slots=True)
class Invoker:
    """``in_hand`` are our calls to it, not what it runs. Times are the event loop's."""

    url: str
    concurrency: int
    in_hand: int = 0
    full: bool = False
    failures: int = 0
    away_until: float = 0.0
    why_away: str = ""
    asked_at: float = 0.0

    def may_ask(self, now: float) -> bool:
        calls = 1 if self.full or self.failures else self.concurrency
        return now >= self.away_until and self.in_hand < calls

    def answered(self) -> None:
        self.full, self.failures, self.away_until, self.why_away = False, 0, 0.0, ""

    def had_no_slot(self) -> None:
        self.full, self.failures, self.away_until, self.why_away = True, 0, 0.0, ""

    def is_away(self, now: float, why: str) -> None:
        shortest, longest = AWAY_SECONDS
        self.away_until = now + min(longest, shortest * 2**self.failures)
        self.failures = min(self.failures + 1, 16)
        self.why_away = why


class Turn:
    """A call to an invoker, and possibly to another one after it, from the moment it is meant to be made."""

    def __init__(self, invoker: Invoker) -> None:
        self.invoker = invoker
        invoker.in_hand += 1

    def move(self, other: Invoker) -> None:
        self.end()
        self.invoker = other
        other.in_hand += 1

    def end(self) -> None:
        self.invoker.in_hand -= 1


class Invokers:
    def __init__(self) -> None:
        self._known: dict[str, Invoker] = {}

    def __len__(self) -> int:
        return len(self._known)

    def see(self, present: Sequence[InvokerRow]) -> None:
        """Who is there now. Those that are known keep what is known of them."""
        known = {row.url: self._known.get(row.url) or Invoker(row.url, row.concurrency) for row in present}
        for row in present:
            known[row.url].concurrency = row.concurrency
        self._known = known

    def choose(self, now: float) -> Invoker | None:
        """The least loaded one that may be asked; of several, the one that wasn't for longest."""
        free = [invoker for invoker in self._known.values() if invoker.may_ask(now)]
        if not free:
            return None
        chosen = min(free, key=lambda each: (each.full, each.in_hand / each.concurrency, each.asked_at))
        chosen.asked_at = now
        return chosen

    def choose_other(self, than: Invoker, now: float) -> Invoker | None:
        """Somebody else for a lease that ``than`` didn't take, unless they have no slot either."""
        other = self.choose(now)
        return other if other is not None and other is not than and not other.full else None

    def why_nobody(self, now: float) -> str | None:
        """Why nothing can be handed over for now; None when somebody only has to find a slot."""
        if not self._known:
            return "no invoker is registered; start one with `tracelake worker --runtime lambda`"
        if all(invoker.away_until > now for invoker in self._known.values()):
            return next(iter(self._known.values())).why_away
        return None
