"""``Supervisor``: starts each part once those it needs are ready, restarts it with backoff, stops all in reverse
order.

One thread per part, its ``PartSupervisor``, does everything to that part: it starts it, checks it and restarts
it. It lives for as long as the part may, because the kernel's parent-death signal, by which no process outlives the
supervisor, is bound to the thread that forked.

The thread that called ``bring_up`` and ``watch`` receives every change through one queue, and passes it on to a
``ProgressListener``. Signal handlers put into the same queue: ``SimpleQueue.put`` is reentrant, events and
conditions are not. So a second Ctrl-C during the stop is just another message that isn't read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Protocol, assert_never

from tracelake.domain.backoff import Backoff

_CHECK_SECONDS = 0.1
_STEADY_SECONDS = 30.0
_RESTART = Backoff(first=0.25, longest=10.0)
_DEATHS_TO_EXPLAIN = 3
"""Deaths in a row from which on the last lines of the log are shown; a single one may be bad luck."""
_SIGNAL_SECONDS = 0.5
STOP_SECONDS = 9.0
"""For all stages together. Parts stop sooner by themselves, so this only bounds one that is stuck in its start."""


class Part(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""

    @property
    def alive(self) -> bool: ...

    @property
    def ended(self) -> str:
        """How it ended, such as "was killed by SIGKILL"."""

    def start(self, stopping: threading.Event) -> None:
        """Return once it is ready, or soon after ``stopping`` is set; raise when it can't be started.

        Called again after it died.
        """

    def stop(self) -> None:
        """End it within its own patience, leaving no process. Repeatable, also before the first start."""

    def log_tail(self) -> tuple[str, ...]:
        """The last lines of its log."""


class PartState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DIED = "died"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartProgress:
    """``seconds`` is the duration of the start of a part that is ready, and the delay until the next start of one
    that died. ``again``: it had died before. ``why`` is the reason of a death or failure, or the parts that one
    waits for; ``log_tail`` are the last lines of its log."""

    name: str
    state: PartState
    seconds: float = 0.0
    again: bool = False
    why: str = ""
    log_tail: tuple[str, ...] = ()


class ProgressListener(Protocol):
    def part(self, change: PartProgress) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PartChanged:
    change: PartProgress


@dataclass(frozen=True, slots=True)
class PartFailed:
    """The first start of a part failed."""

    name: str
    error: BaseException


KeeperEvent = PartChanged | PartFailed


def delay_before_restart(deaths: int) -> float:
    """Seconds after that number of deaths in a row: at first hardly noticeable, then doubling."""
    return _RESTART.delay(deaths)


class PartSupervisor(threading.Thread):
    def __init__(self, part: Part, notify: Callable[[KeeperEvent], None]) -> None:
        super().__init__(name=f"keeper-{part.name}", daemon=True)
        self.part = part
        self.stopping = threading.Event()
        self._notify = notify

    def run(self) -> None:
        try:
            self._start(again=False)
            self._keep()
        except BaseException as error:
            self._notify(PartFailed(self.part.name, error))
        finally:
            self.part.stop()

    def _start(self, *, again: bool) -> None:
        began = time.monotonic()
        self._report(PartState.STARTING, again=again)
        self.part.start(self.stopping)
        # A start returns early when a stop is requested, and the part isn't ready then.
        if not self.stopping.is_set():
            self._report(PartState.READY, seconds=time.monotonic() - began, again=again)

    def _keep(self) -> None:
        deaths, ready_at = 0, time.monotonic()
        while not self.stopping.wait(_CHECK_SECONDS):
            if self.part.alive:
                continue
            # A part that was ready for long has a new reason to die: the backoff begins again.
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
        """True when a stop was requested instead."""
        delay = delay_before_restart(deaths)
        log_tail = self.part.log_tail() if deaths >= _DEATHS_TO_EXPLAIN else ()
        self._report(PartState.DIED, seconds=delay, why=why, log_tail=log_tail)
        return self.stopping.wait(delay)

    def _report(
        self,
        state: PartState,
        *,
        seconds: float = 0.0,
        again: bool = False,
        why: str = "",
        log_tail: tuple[str, ...] = (),
    ) -> None:
        progress = PartProgress(
            name=self.part.name, state=state, seconds=seconds, again=again, why=why, log_tail=log_tail
        )
        self._notify(PartChanged(progress))


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Supervisor:
    def __init__(self, listener: ProgressListener) -> None:
        self._listener = listener
        self._notices: SimpleQueue[KeeperEvent | _Stop] = SimpleQueue()
        self._stages: list[list[PartSupervisor]] = []

    def request_stop(self, *_: object) -> None:
        """Request the end, from any thread or as a signal handler."""
        self._notices.put(_Stop())

    def bring_up(self, stages: Sequence[Sequence[Part]], needs: Mapping[str, frozenset[str]]) -> bool:
        """Start each part once those that it needs, by name, are ready, and wait for all; False when a stop was
        requested meanwhile. ``stages`` is the order in which they are stopped, the last one first."""
        self._stages = [[PartSupervisor(part, self._notices.put) for part in stage] for stage in stages]
        waiting = {keeper.part.name: keeper for stage in self._stages for keeper in stage}
        missing = set(waiting)
        for name in waiting:
            reason = ", ".join(sorted(needs.get(name, ())))
            self._listener.part(PartProgress(name=name, state=PartState.WAITING, why=reason))
        while missing:
            for name in [name for name in waiting if not needs.get(name, frozenset()) & missing]:
                waiting.pop(name).start()
            progress = self._next_progress()
            if progress is None:
                return False
            if progress.state is PartState.READY:
                missing.discard(progress.name)
        return True

    def watch(self, on_restart: Callable[[], None]) -> None:
        """Run until a stop is requested; ``on_restart`` is called when a part that had died is ready again."""
        while (progress := self._next_progress()) is not None:
            if progress.state is PartState.READY:
                on_restart()

    def _next_progress(self) -> PartProgress | None:
        """The next change, after the listener received it; None when a stop was requested."""
        match notice := self._next():
            case _Stop():
                return None
            case PartFailed(name, error):
                self._listener.part(PartProgress(name=name, state=PartState.FAILED, why=str(error)))
                raise error
            case PartChanged(progress):
                self._listener.part(progress)
                return progress
            case _:
                assert_never(notice)

    def _next(self) -> KeeperEvent | _Stop:
        """Waits in short turns: Python runs a signal's handler only between two instructions, so a signal that
        comes just before the wait begins would otherwise be noticed no sooner than the next one."""
        while True:
            with suppress(Empty):
                return self._notices.get(timeout=_SIGNAL_SECONDS)

    def stop(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for stage in reversed(self._stages):
            # All of a stage end at the same time, and before the parts that they depend on.
            for keeper in stage:
                keeper.stopping.set()
            for keeper in stage:
                # A thread that was never started can't be joined.
                if keeper.ident is not None:
                    keeper.join(max(0.0, deadline - time.monotonic()))

    def pids(self) -> dict[str, int]:
        keepers = [keeper for stage in self._stages for keeper in stage]
        return {keeper.part.name: pid for keeper in keepers if (pid := keeper.part.pid) is not None}
