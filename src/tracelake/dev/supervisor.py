"""Keeps parts running: each started once those it needs are ready, restarted with backoff when it dies, and all
stopped in reverse order.

One thread per part does everything to that part; the thread that called ``bring_up`` and ``watch`` hears of
it through one queue, which signal handlers may put into as well (``SimpleQueue.put`` is reentrant, which
events and conditions are not). So a second Ctrl-C during the stop is just another message that nobody reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import assert_never

from tracelake.dev.keeper import Failed, Keeper, News, Notice
from tracelake.dev.part import Part
from tracelake.dev.progress import Onlooker, PartNews, PartState

_SIGNAL_SECONDS = 0.5
_STOP_SECONDS = 9.0
"""For all stages together; parts have less patience, so it only bounds one that is stuck in its start."""


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Supervisor:
    def __init__(self, onlooker: Onlooker) -> None:
        self._onlooker = onlooker
        self._notices: SimpleQueue[Notice | _Stop] = SimpleQueue()
        self._stages: list[list[Keeper]] = []

    def request_stop(self, *_: object) -> None:
        """From any thread, and as a signal handler."""
        self._notices.put(_Stop())

    def bring_up(self, stages: Sequence[Sequence[Part]], needs: Mapping[str, frozenset[str]]) -> bool:
        """Start each part once those that it needs, by name, are ready, and wait for all; False when a stop was
        asked for meanwhile. ``stages`` is the order in which they are stopped, the last one first."""
        self._stages = [[Keeper(part, self._notices.put) for part in stage] for stage in stages]
        waiting = {keeper.part.name: keeper for stage in self._stages for keeper in stage}
        missing = set(waiting)
        for name in waiting:
            reason = ", ".join(sorted(needs.get(name, ())))
            self._onlooker.part(PartNews(name=name, state=PartState.WAITING, why=reason))
        while missing:
            for name in [name for name in waiting if not needs.get(name, frozenset()) & missing]:
                waiting.pop(name).start()
            news = self._next_news()
            if news is None:
                return False
            if news.state is PartState.READY:
                missing.discard(news.name)
        return True

    def watch(self, on_restart: Callable[[], None]) -> None:
        """Until a stop is asked for; ``on_restart`` runs when a part that had died is ready again."""
        while (news := self._next_news()) is not None:
            if news.state is PartState.READY:
                on_restart()

    def _next_news(self) -> PartNews | None:
        """What changed next, after the onlooker heard of it; None when a stop was asked for."""
        match notice := self._next():
            case _Stop():
                return None
            case Failed(name, error):
                self._onlooker.part(PartNews(name=name, state=PartState.FAILED, why=str(error)))
                raise error
            case News(news):
                self._onlooker.part(news)
                return news
            case _:
                assert_never(notice)

    def _next(self) -> Notice | _Stop:
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
                if keeper.ident is not None:
                    keeper.join(max(0.0, deadline - time.monotonic()))

    def pids(self) -> dict[str, int]:
        keepers = [keeper for stage in self._stages for keeper in stage]
        return {keeper.part.name: pid for keeper in keepers if (pid := keeper.part.pid) is not None}
