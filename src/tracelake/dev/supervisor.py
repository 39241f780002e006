"""Keeps parts running: started together, restarted with backoff when they die, stopped in reverse order.

One thread per part does everything to that part; the thread that called ``bring_up`` and ``watch`` hears of
it through one queue, which signal handlers may put into as well (``SimpleQueue.put`` is reentrant, which
events and conditions are not). So a second Ctrl-C during the stop is just another message that nobody reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import assert_never

from tracelake.dev.part import Part

_LOOK_SECONDS = 0.1
_SIGNAL_SECONDS = 0.5
_STEADY_SECONDS = 30.0
_FIRST_DELAY = 0.25
_LONGEST_DELAY = 10.0
_STOP_SECONDS = 9.0
"""For all stages together; parts have less patience, so it only bounds one that is stuck in its start."""


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(frozen=True, slots=True)
class _Ready:
    name: str


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _Died:
    name: str
    delay: float
    why: str


Notice = _Stop | _Ready | _Failed | _Died


def delay_before_restart(deaths: int) -> float:
    """After the first death at once, as far as a person can tell; then ever more slowly."""
    return float(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(deaths - 1, 10)))


class Supervisor:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._notices: SimpleQueue[Notice] = SimpleQueue()
        self._stages: list[list[_Keeper]] = []

    def request_stop(self, *_: object) -> None:
        """From any thread, and as a signal handler."""
        self._notices.put(_Stop())

    def bring_up(self, *parts: Part) -> bool:
        """Start these together and wait until all are ready; False when a stop was asked for meanwhile."""
        stage = [_Keeper(part, self._notices) for part in parts]
        self._stages.append(stage)
        for keeper in stage:
            keeper.start()
        missing = {part.name for part in parts}
        while missing:
            match notice := self._next():
                case _Stop():
                    return False
                case _Failed(error):
                    raise error
                case _Ready(name):
                    missing.discard(name)
                case _Died():
                    self._report(notice)
                case _:
                    assert_never(notice)
        return True

    def watch(self, on_restart: Callable[[], None]) -> None:
        """Until a stop is asked for; ``on_restart`` runs when a part that had died is ready again."""
        while True:
            match notice := self._next():
                case _Stop():
                    return
                case _Failed(error):
                    raise error
                case _Ready(name):
                    self._say(f"{name} runs again")
                    on_restart()
                case _Died():
                    self._report(notice)
                case _:
                    assert_never(notice)

    def _next(self) -> Notice:
        """Looks up now and then: Python runs a signal's handler only between two instructions, so a signal that
        comes just before the wait begins would otherwise be noticed no sooner than the next one."""
        while True:
            with suppress(Empty):
                return self._notices.get(timeout=_SIGNAL_SECONDS)

    def stop(self) -> None:
        deadline = time.monotonic() + _STOP_SECONDS
        for stage in reversed(self._stages):
            for keeper in stage:
                keeper.stopping.set()
            for keeper in stage:
                keeper.join(max(0.0, deadline - time.monotonic()))

    def pids(self) -> dict[str, int]:
        keepers = [keeper for stage in self._stages for keeper in stage]
        return {keeper.part.name: pid for keeper in keepers if (pid := keeper.part.pid) is not None}

    def _report(self, died: _Died) -> None:
        self._say(f"{died.name} {died.why}; starting it again in {died.delay:g} s")


class _Keeper(threading.Thread):
    """The one thread that touches its part."""

    def __init__(self, part: Part, notices: SimpleQueue[Notice]) -> None:
        super().__init__(name=f"keeper-{part.name}", daemon=True)
        self.part = part
        self.stopping = threading.Event()
        self._notices = notices

    def run(self) -> None:
        try:
            self.part.start(self.stopping)
            self._notices.put(_Ready(self.part.name))
            self._keep()
        except BaseException as error:
            self._notices.put(_Failed(error))
        finally:
            self.part.stop()

    def _keep(self) -> None:
        deaths, ready_at = 0, time.monotonic()
        while not self.stopping.wait(_LOOK_SECONDS):
            if self.part.alive:
                continue
            deaths = 1 if time.monotonic() - ready_at > _STEADY_SECONDS else deaths + 1
            why = "ended"
            while not self._wait_to_restart(deaths, why):
                try:
                    self.part.start(self.stopping)
                except Exception as error:
                    deaths, why = deaths + 1, f"can't be started: {error}"
                    continue
                ready_at = time.monotonic()
                if not self.stopping.is_set():
                    self._notices.put(_Ready(self.part.name))
                break

    def _wait_to_restart(self, deaths: int, why: str) -> bool:
        """True when a stop was asked for instead."""
        delay = delay_before_restart(deaths)
        self._notices.put(_Died(self.part.name, delay, why))
        return self.stopping.wait(delay)
