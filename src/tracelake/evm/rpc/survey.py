"""The same question to every endpoint at once: to compare what they say, or to have the first and best of it.

A failure is an outcome here. Without patience, those that take much longer than the first aren't waited for.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.exchange import Call, Outcome
from tracelake.evm.rpc.problem import Problem
from tracelake.evm.rpc.roster import Roster

_LONGEST_SECONDS = 5.0
_STRAGGLERS_SECONDS = 0.3

Awaited = tuple[Future[Outcome], float]
"""An answer to come, and since when it is awaited."""


class Survey:
    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._lock = threading.Lock()
        self._under_way: dict[tuple[Any, ...], Awaited] = {}

    def ask(self, call: Call, *, patient: bool) -> list[tuple[Endpoint, Outcome]]:
        """In the order of the configuration; of those that may be used and have answered."""
        endpoints = self._roster.wake()
        if not endpoints or patient:
            most = min(_LONGEST_SECONDS, self._roster.config.deadline_seconds)
            self._roster.introduce_all(time.monotonic() + most)
            endpoints = self._roster.usable()
        began = time.monotonic()
        asked = {each: self._begin(each, call, began + _LONGEST_SECONDS) for each in endpoints}
        late = began - _STRAGGLERS_SECONDS
        awaited = {answer for answer, since in asked.values() if patient or since > late}
        _wait_for(awaited, began + _LONGEST_SECONDS, patient)
        return [(each, answer.result()) for each, (answer, _) in asked.items() if answer.done()]

    def _begin(self, endpoint: Endpoint, call: Call, deadline: float) -> Awaited:
        """Who asks the same of the same at the same time shares the answer: one that hangs is asked once."""
        key = (endpoint.name, call[0], *call[1])
        with self._lock:
            self._under_way = {key: each for key, each in self._under_way.items() if not each[0].done()}
            if key not in self._under_way:
                answer = self._roster.beside(partial(_ask_once, endpoint, call, deadline))
                self._under_way[key] = (answer, time.monotonic())
            return self._under_way[key]


def _ask_once(endpoint: Endpoint, call: Call, deadline: float) -> Outcome:
    """What few calls this makes are counted, and not held back."""
    endpoint.bucket.take(1, time.monotonic())
    try:
        outcomes, _ = endpoint.exchange([call], deadline, kind="single")
    except Problem as problem:
        return problem
    return outcomes[0]


def _wait_for(answers: set[Future[Outcome]], deadline: float, patient: bool) -> None:
    began = time.monotonic()
    while answers and (now := time.monotonic()) < deadline:
        done, answers = wait(answers, deadline - now, return_when=FIRST_COMPLETED)
        if not patient and any(not isinstance(answer.result(), Problem) for answer in done):
            now = time.monotonic()
            deadline = min(deadline, now + max(_STRAGGLERS_SECONDS, 2 * (now - began)))
