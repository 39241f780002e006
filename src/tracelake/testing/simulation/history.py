"""What callers asked and what they were told, in order. An answer that got lost on its way is not here."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(slots=True)
class Call:
    """``issued``, ``answered`` and ``lost`` are positions in one order of everything that callers saw."""

    kind: str
    request: Any
    issued: int
    issued_at: datetime
    echo: bool = False
    answered: int | None = None
    answered_at: datetime | None = None
    answer: Any = None
    lost: int | None = None

    @property
    def finished(self) -> int:
        """From when on the call can't have any effect any more."""
        return self.answered or self.lost or sys.maxsize

    @property
    def refused(self) -> bool:
        return isinstance(self.answer, Exception)

    @property
    def accepted(self) -> bool:
        return self.answered is not None and not self.refused


@dataclass(slots=True)
class History:
    calls: list[Call] = field(default_factory=list)
    _order: int = 0

    def issue(self, kind: str, request: Any, now: datetime, *, echo: bool) -> Call:
        self._order += 1
        call = Call(kind, request, self._order, now, echo)
        self.calls.append(call)
        return call

    def answer(self, call: Call, answer: Any, now: datetime) -> None:
        self._order += 1
        call.answered, call.answered_at, call.answer = self._order, now, answer

    def lose(self, call: Call) -> None:
        self._order += 1
        call.lost = self._order

    def of(self, *kinds: str) -> list[Call]:
        return [call for call in self.calls if call.kind in kinds]

    @property
    def acknowledged(self) -> int:
        return sum(call.answered is not None for call in self.calls)

    def words(self) -> set[str]:
        """The machine words that callers were told, to see what a run has reached."""
        words: set[str] = set()
        for call in self.calls:
            for answer in (call.answer, *getattr(call.answer, "events", ())):
                words |= {str(getattr(answer, name, "")) for name in ("status", "reason", "state")}
        return words
