"""What is known about an endpoint: how it does, what it lacks, how far it is.

Two kinds of trouble: a *rest* was asked for by the endpoint (429) and is kept; a *suspicion* follows failures,
grows with each in a row, and only puts the endpoint behind the others. A method that it doesn't have isn't asked of
it again for a while; all else goes on.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from tracelake.evm.rpc.problem import Kind, Problem

_SUSPECT_SECONDS = (0.5, 30.0)
_REST_SECONDS = (0.5, 8.0)
_LONGEST_REST = 60.0
_LOCKED_OUT_SECONDS = 60.0
_NO_METHOD_SECONDS = 600.0
_WEIGHT = 0.3
"""Of the newest latency in the running one."""

_WHOLE_ENDPOINT = (Kind.TRANSPORT, Kind.TIMEOUT, Kind.SERVER, Kind.GARBLED, Kind.LOCKED_OUT)


@dataclass(slots=True)
class Health:
    latency: float | None = None
    head: int | None = None
    requests: int = 0
    calls: int = 0
    bytes: int = 0
    failures: int = 0
    rate_limited: int = 0
    mismatches: int = 0
    last: Problem | None = None
    _in_a_row: int = 0
    _rests_in_a_row: int = 0
    _suspect_until: float = 0.0
    _rest_until: float = 0.0
    _missing: dict[str, float] = field(default_factory=dict)

    def answered(self, seconds: float, calls: int, size: int) -> None:
        self.requests += 1
        self.calls += calls
        self.bytes += size
        self.latency = seconds if self.latency is None else self.latency + _WEIGHT * (seconds - self.latency)
        self._in_a_row = 0
        self._rests_in_a_row = 0
        self._suspect_until = 0.0

    def failed(self, problem: Problem, now: float) -> None:
        """What a request, or a call of it, came to. What concerns one call alone says nothing of the endpoint."""
        self.last = problem
        if problem.kind is Kind.RATE_LIMITED:
            self._rest(problem.retry_after, now)
        elif problem.kind in _WHOLE_ENDPOINT:
            self.failures += 1
            if problem.retry_after is not None:
                self._rest(problem.retry_after, now)
            self._suspect(now, _LOCKED_OUT_SECONDS if problem.kind is Kind.LOCKED_OUT else None)

    def lied(self, what: str, now: float) -> None:
        self.mismatches += 1
        self.last = Problem(Kind.GARBLED, what)
        self._suspect(now, None)

    @property
    def last_problem(self) -> str | None:
        return None if self.last is None else self.last.text

    def lacks(self, method: str, now: float) -> bool:
        """Whether it was heard to have no such method, not long ago."""
        until = self._missing.get(method)
        if until is None or until > now:
            return until is not None
        del self._missing[method]
        return False

    def missing_now(self, method: str) -> bool:
        return self.lacks(method, time.monotonic())

    def has_no(self, method: str, now: float) -> None:
        self._missing[method] = now + _NO_METHOD_SECONDS

    def missing(self, now: float) -> list[str]:
        return sorted(method for method, until in self._missing.items() if until > now)

    def seen(self, number: int) -> None:
        """It has this block."""
        if self.head is None or number > self.head:
            self.head = number

    def suspicion(self, now: float) -> float:
        """Seconds for which others are preferred."""
        return max(0.0, self._suspect_until - now)

    def rest(self, now: float) -> float:
        """Seconds that it wants to be left alone."""
        return max(0.0, self._rest_until - now)

    def _suspect(self, now: float, seconds: float | None) -> None:
        self._in_a_row += 1
        shortest, longest = _SUSPECT_SECONDS
        seconds = seconds or min(longest, shortest * 2 ** min(self._in_a_row - 1, 16))
        # Callers that failed together don't come back together.
        self._suspect_until = max(self._suspect_until, now + seconds * random.uniform(0.5, 1.0))

    def _rest(self, asked: float | None, now: float) -> None:
        self.rate_limited += 1
        self._rests_in_a_row += 1
        shortest, longest = _REST_SECONDS
        own = min(longest, shortest * 2 ** min(self._rests_in_a_row - 1, 16))
        seconds = own if asked is None else min(asked, _LONGEST_REST)
        self._rest_until = max(self._rest_until, now + seconds)
