"""The one thread that touches its part: starts it, looks whether it lives, and starts it again when it doesn't."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tracelake.dev.part import Part
from tracelake.dev.progress import PartNews, PartState

_LOOK_SECONDS = 0.1
_STEADY_SECONDS = 30.0
_FIRST_DELAY = 0.25
_LONGEST_DELAY = 10.0
_DEATHS_TO_EXPLAIN = 3
"""One death is bad luck; from so many in a row on, what the log says last is shown."""


@dataclass(frozen=True, slots=True)
class News:
    news: PartNews


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be started for the first time."""

    name: str
    error: BaseException


Notice = News | Failed


def delay_before_restart(deaths: int) -> float:
    """After the first death at once, as far as a person can tell; then ever more slowly."""
    return float(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(deaths - 1, 10)))


class Keeper(threading.Thread):
    def __init__(self, part: Part, notify: Callable[[Notice], None]) -> None:
        super().__init__(name=f"keeper-{part.name}", daemon=True)
        self.part = part
        self.stopping = threading.Event()
        self._notify = notify

    def run(self) -> None:
        try:
            self._start(again=False)
            self._keep()
        except BaseException as error:
            self._notify(Failed(self.part.name, error))
        finally:
            self.part.stop()

    def _start(self, *, again: bool) -> None:
        began = time.monotonic()
        self._tell(PartState.STARTING, again=again)
        self.part.start(self.stopping)
        if not self.stopping.is_set():
            self._tell(PartState.READY, seconds=time.monotonic() - began, again=again)

    def _keep(self) -> None:
        deaths, ready_at = 0, time.monotonic()
        while not self.stopping.wait(_LOOK_SECONDS):
            if self.part.alive:
                continue
            deaths = 1 if time.monotonic() - ready_at > _STEADY_SECONDS else deaths + 1
            why = self.part.ended
            while not self._wait_to_restart(deaths, why):
                try:
                    self._start(again=True)
                except Exception as error:
                    deaths, why = deaths + 1, f"can't be started: {error}"
                    continue
                ready_at = time.monotonic()
                break

    def _wait_to_restart(self, deaths: int, why: str) -> bool:
        """True when a stop was asked for instead."""
        delay = delay_before_restart(deaths)
        last_words = self.part.last_words() if deaths >= _DEATHS_TO_EXPLAIN else ()
        self._tell(PartState.DIED, seconds=delay, why=why, last_words=last_words)
        return self.stopping.wait(delay)

    def _tell(
        self,
        state: PartState,
        *,
        seconds: float = 0.0,
        again: bool = False,
        why: str = "",
        last_words: tuple[str, ...] = (),
    ) -> None:
        news = PartNews(
            name=self.part.name, state=state, seconds=seconds, again=again, why=why, last_words=last_words
        )
        self._notify(News(news))
