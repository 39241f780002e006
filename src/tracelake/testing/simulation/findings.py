"""What an audit found: the invariant that was broken, what was expected and what was seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    invariant: str
    expected: str
    seen: str

    def __str__(self) -> str:
        return f"{self.invariant}\n  expected: {self.expected}\n  seen:     {self.seen}"
