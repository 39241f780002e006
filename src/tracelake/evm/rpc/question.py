"""One thing that is asked of the pool, over all its tries: who was asked, what came of it, who is left to ask."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable

from tracelake.domain.errors import TracelakeError
from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.errors import RpcRefused, RpcUnavailable
from tracelake.evm.rpc.problem import Kind, Problem

_PATIENCE = 12
_COST = {
    Kind.TRANSPORT: 1,
    Kind.TIMEOUT: 2,
    Kind.SERVER: 1,
    Kind.GARBLED: 3,
    Kind.RATE_LIMITED: 0,
    Kind.LOCKED_OUT: _PATIENCE,
    Kind.BATCH: 1,
    Kind.TOO_MUCH: 3,
    Kind.NO_METHOD: _PATIENCE,
    Kind.REFUSED: _PATIENCE,
    Kind.MISSING: 3,
}
"""How much of the patience with an endpoint a problem uses up. A rate limit is bounded by the deadline alone."""
_HOPELESS = (Kind.REFUSED, Kind.NO_METHOD)
_PAUSES = (0.05, 2.0)

_LACKING_SECONDS = 3.0
_SUSPECT_SECONDS = 2.0
_LAGGING_SECONDS = 1.0
_TRIED_SECONDS = 1.0
_AVOIDED_SECONDS = 1000.0


class Question:
    """``needs`` are methods that an endpoint must have, ``prefers`` ones that it had better have. ``avoid`` names
    endpoints that are asked only when nobody else is left. ``block`` is the newest one that it is about."""

    def __init__(
        self,
        what: str,
        deadline: float,
        *,
        needs: Iterable[str] = (),
        prefers: Iterable[str] = (),
        avoid: Iterable[str] = (),
        block: int | None = None,
    ) -> None:
        self.what = what
        self.deadline = deadline
        self.needs = frozenset(needs)
        self.prefers = frozenset(prefers)
        self.avoid = set(avoid)
        self.block = block
        self.problems: dict[str, Problem] = {}
        self._spent: Counter[str] = Counter()
        self._tries: Counter[str] = Counter()
        self._paused_until: dict[str, float] = {}

    def may_ask(self, endpoint: Endpoint, now: float) -> bool:
        for method in self.needs:
            if endpoint.health.lacks(method, now) and endpoint.name not in self.problems:
                self.problems[endpoint.name] = Problem(Kind.NO_METHOD, f"it has no {method}", code=-32601)
                self._spent[endpoint.name] = _PATIENCE
        return self._spent[endpoint.name] < _PATIENCE

    def was_asked(self, endpoint: Endpoint) -> bool:
        return self._tries[endpoint.name] > 0

    def wait(self, endpoint: Endpoint, now: float) -> float:
        """Seconds before it may be asked: what it wants itself, and after a failure some peace."""
        suspicion = endpoint.health.suspicion(now) if self.was_asked(endpoint) else 0.0
        pause = self._paused_until.get(endpoint.name, 0.0) - now
        return max(0.0, endpoint.health.rest(now), suspicion, pause)

    def cost(self, endpoint: Endpoint, calls: int, now: float) -> float:
        """Seconds that an answer from it would take, as far as one can say, with doubts counted as time."""
        health = endpoint.health
        seconds = self.wait(endpoint, now) + endpoint.bucket.wait(calls, now)
        seconds += (endpoint.in_flight + 1) * (health.latency or 0.0)
        seconds += self._tries[endpoint.name] * _TRIED_SECONDS
        if health.suspicion(now):
            seconds += _SUSPECT_SECONDS
        if any(health.lacks(method, now) for method in self.prefers):
            seconds += _LACKING_SECONDS
        if self.block is not None and health.head is not None and health.head < self.block:
            seconds += _LAGGING_SECONDS
        if endpoint.name in self.avoid:
            seconds += _AVOIDED_SECONDS
        return seconds

    def failed(self, endpoint: Endpoint, problem: Problem, *, in_part: bool = False) -> None:
        """``in_part``: some of the question was answered, and only the rest is asked again."""
        name = endpoint.name
        self.problems[name] = problem
        self._tries[name] += 1
        if not in_part or problem.kind in _HOPELESS:
            self._spent[name] += _COST[problem.kind]
        if problem.kind is not Kind.BATCH:
            # With less at once it may be asked again right away.
            shortest, longest = _PAUSES
            pause = min(longest, shortest * 2 ** min(self._tries[name] - 1, 16))
            self._paused_until[name] = time.monotonic() + pause * random.uniform(0.5, 1.0)

    def give_up(self) -> TracelakeError:
        """The error to raise: what each endpoint's last problem was, by the endpoint's name."""
        kinds = {problem.kind for problem in self.problems.values()}
        if kinds and kinds <= set(_HOPELESS):
            name, problem = next(iter(self.problems.items()))
            return RpcRefused(self.what, name, problem.code, problem.text)
        said = {name: problem.text for name, problem in self.problems.items()}
        return RpcUnavailable(self.what, said)
