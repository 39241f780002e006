"""What a supervisor tells whoever looks on: one piece of news per change of a part, always from the same thread."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PartState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DIED = "died"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNews:
    """``seconds`` is how long the start took of one that is ready, and of one that died how long until the next.
    ``again``: it had died. ``why`` is of one that died or failed, or what one waits for; ``last_words`` are the
    last lines of its log."""

    name: str
    state: PartState
    seconds: float = 0.0
    again: bool = False
    why: str = ""
    last_words: tuple[str, ...] = ()


class Onlooker(Protocol):
    def part(self, news: PartNews) -> None: ...

    def say(self, text: str) -> None: ...
