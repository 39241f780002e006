"""Endpoints of a pool: which of them may be used, and which is asked next.

An endpoint is used only after it has reported its chain id. That request goes to all of them at once and in the
background, so one that hangs doesn't delay the others. Of the usable endpoints, the selector chooses the one with
the lowest expected latency; penalties are added to the expected latency, so the same state gives the same choice.

``PoolRequest`` is one request to the pool over all its attempts: which endpoints were asked, with which result,
and which are left. ``Broadcast`` sends the same call to every endpoint at once, to compare the answers or to use
the first; a failure is an outcome there. Without ``patient`` it doesn't wait for endpoints that take much
longer than the first.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

from tracelake.domain.backoff import Backoff, spread
from tracelake.domain.errors import TracelakeError
from tracelake.evm.rpc.config import PoolConfig
from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.errors import ProblemKind, RpcProblem, RpcRefused, RpcUnavailable
from tracelake.evm.rpc.exchange import RpcCall, RpcOutcome, read_quantity

_INTRODUCTION_SECONDS = 5.0
_AGREEMENT_SECONDS = 1.0
"""Without a configured chain id: how long the other endpoints have after the first has reported its own."""
_LEFT_OUT_SECONDS = 60.0
_LONGEST_WAIT = 1.0
_PATIENCE = 12
_COST = {
    ProblemKind.TRANSPORT: 1,
    ProblemKind.TIMEOUT: 2,
    ProblemKind.SERVER: 1,
    ProblemKind.GARBLED: 3,
    ProblemKind.RATE_LIMITED: 0,
    ProblemKind.LOCKED_OUT: _PATIENCE,
    ProblemKind.BATCH: 1,
    ProblemKind.TOO_MUCH: 3,
    ProblemKind.NO_METHOD: _PATIENCE,
    ProblemKind.REFUSED: _PATIENCE,
    ProblemKind.MISSING: 3,
}
"""The part of ``_PATIENCE`` that a problem uses up. A rate limit is bounded by the deadline alone."""
_HOPELESS = (ProblemKind.REFUSED, ProblemKind.NO_METHOD)
_PAUSE = Backoff(first=0.05, longest=2.0)
_LACKING_SECONDS = 3.0
_SUSPECT_SECONDS = 2.0
_LAGGING_SECONDS = 1.0
_TRIED_SECONDS = 1.0
_AVOIDED_SECONDS = 1000.0
_LONGEST_SECONDS = 5.0
_STRAGGLERS_SECONDS = 0.3
Awaited = tuple[Future[RpcOutcome], float]
"""A pending answer, and the time since when it is awaited."""


class EndpointSelector:
    def __init__(self, config: PoolConfig, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError("share is a part of the whole: more than 0, at most 1")
        self.config = config
        self.endpoints = [Endpoint(each, share) for each in config.endpoints]
        self._changed = threading.Condition()
        # Two for each endpoint: those that hang must leave threads for the others.
        self._side = ThreadPoolExecutor(2 * len(self.endpoints), thread_name_prefix=f"rpc-{config.name}-side")
        self._introducing: set[str] = set()
        self._chain_ids: dict[str, int] = {}
        self._first_chain_id_at: float | None = None
        self._left_out_at: dict[str, float] = {}
        self._chain_id = config.chain_id
        self._failed_checks: Counter[str] = Counter()
        self.closed = threading.Event()

    @property
    def chain_id(self) -> int | None:
        return self._chain_id

    @contextmanager
    def ask(self, question: PoolRequest, calls: int) -> Iterator[Endpoint]:
        """Reserve an endpoint for ``calls`` calls, within its limit of concurrency. Raises when none is left to
        ask."""
        endpoint = self._acquire(question, calls)
        try:
            yield endpoint
        finally:
            with self._changed:
                # Callers that found every endpoint busy wait for this.
                endpoint.in_flight -= 1
                self._changed.notify_all()

    def exchange(
        self, endpoint: Endpoint, calls: Sequence[RpcCall], question: PoolRequest, kind: str
    ) -> tuple[list[RpcOutcome], int]:
        """Make one round trip within the endpoint's rate and the question's deadline. Raises ``RpcProblem``."""
        wait = endpoint.bucket.take(len(calls), time.monotonic())
        if wait > 0:
            # Waiting for our own rate limit is no failure, so it doesn't count against the deadline.
            question.deadline += wait
            self.pause(wait)
        return endpoint.exchange(calls, question.deadline, kind=kind)

    def usable(self) -> list[Endpoint]:
        """Endpoints known to be on the right chain."""
        return [endpoint for endpoint in self.endpoints if self._is_known(endpoint)]

    def wake(self) -> list[Endpoint]:
        """Return the usable endpoints, and ask the others in the background which chain they are on."""
        now = time.monotonic()
        with self._changed:
            for endpoint in self.endpoints:
                if not self._is_left_out(endpoint, now) and not endpoint.health.suspicion(now):
                    self._check_chain(endpoint)
        return self.usable()

    def check_chains(self, deadline: float) -> None:
        """Wait until each endpoint has reported its chain or failed. While some are usable, those that failed just
        now aren't asked again."""
        if not self.wake():
            with self._changed:
                for endpoint in self.endpoints:
                    self._check_chain(endpoint)
        with self._changed:
            while self._introducing and not self.closed.is_set() and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            # No more answers are awaited: those that came decide.
            self._agree(time.monotonic(), final=True)

    def beside(self, work: Callable[[], Any]) -> Future[Any]:
        """Run something small in the background."""
        return self._side.submit(work)

    def pause(self, seconds: float) -> None:
        if self.closed.wait(max(0.0, seconds)):
            raise RpcUnavailable("anything", {self.config.name: "the pool was closed"})

    def close(self) -> None:
        with self._changed:
            self.closed.set()
            self._changed.notify_all()
        for endpoint in self.endpoints:
            endpoint.close()
        self._side.shutdown(cancel_futures=True)

    def _acquire(self, question: PoolRequest, calls: int) -> Endpoint:
        # Failures from before this question aren't counted against it.
        base = Counter(self._failed_checks)
        with self._changed:
            while True:
                now = time.monotonic()
                if self.closed.is_set():
                    raise RpcUnavailable(question.what, {self.config.name: "the pool is closed"})
                if now >= question.deadline:
                    self._record_timeouts(question)
                    raise question.give_up()
                self._note_failures(question, base)
                self._agree(now)
                wait = self._seek(question, now)
                known = [each for each in self.usable() if question.may_ask(each, now)]
                busy = False
                if known:
                    best = min(known, key=lambda each: question.cost(each, calls, now))
                    wait = question.wait(best, now)
                    busy = best.in_flight >= best.config.max_concurrency
                    if wait <= 0 and not busy:
                        best.in_flight += 1
                        return best
                elif wait is None:
                    raise question.give_up()
                # At least a millisecond, so that rounding can't make this a busy loop.
                self._changed.wait(min(question.deadline - now, max(wait or _LONGEST_WAIT, 0.001)))
                if busy:
                    # The callers before this one have deadlines of their own, so this wait is bounded.
                    question.deadline += time.monotonic() - now

    def _seek(self, question: PoolRequest, now: float) -> float | None:
        """Ask unknown endpoints for their chain. Seconds until another may become usable, None if there is none."""
        waits: list[float] = []
        for endpoint in self.endpoints:
            if self._is_known(endpoint) or not question.may_ask(endpoint, now):
                continue
            if endpoint.name in self._introducing or (endpoint.chain is not None and self._chain_id is None):
                waits.append(_LONGEST_WAIT)
                continue
            suspicion = max(endpoint.health.suspicion(now), endpoint.health.rest(now))
            if self._is_left_out(endpoint, now):
                self._record_exclusion(question, endpoint)
            elif suspicion > 0 and (question.was_asked(endpoint) or self.usable()):
                waits.append(suspicion)
            else:
                self._check_chain(endpoint)
                waits.append(_LONGEST_WAIT)
        return min(waits, default=None)

    def _record_timeouts(self, question: PoolRequest) -> None:
        for endpoint in self.endpoints:
            if endpoint.name not in question.problems:
                problem = endpoint.left_out or endpoint.health.last_problem or "no answer before the deadline"
                question.problems[endpoint.name] = RpcProblem(ProblemKind.TIMEOUT, problem)

    def _record_exclusion(self, question: PoolRequest, endpoint: Endpoint) -> None:
        question.problems[endpoint.name] = RpcProblem(ProblemKind.LOCKED_OUT, endpoint.left_out or "left out")

    def _note_failures(self, question: PoolRequest, base: Counter[str]) -> None:
        """A failed introduction counts as a failed attempt of every question that waits for it."""
        for endpoint in self.endpoints:
            for _ in range(self._failed_checks[endpoint.name] - base[endpoint.name]):
                question.failed(
                    endpoint, endpoint.health.last or RpcProblem(ProblemKind.TRANSPORT, "no answer")
                )
            base[endpoint.name] = self._failed_checks[endpoint.name]

    def _check_chain(self, endpoint: Endpoint) -> None:
        if endpoint.name in self._introducing or self.closed.is_set() or self._is_known(endpoint):
            return
        self._introducing.add(endpoint.name)
        endpoint.chain = None
        # In the background: an endpoint that hangs must not delay questions that others can answer.
        self._side.submit(self._ask_chain, endpoint)

    def _ask_chain(self, endpoint: Endpoint) -> None:
        chain: int | None = None
        try:
            deadline = time.monotonic() + _INTRODUCTION_SECONDS
            outcomes, _ = endpoint.exchange([("eth_chainId", [])], deadline, kind="single")
            chain = read_quantity(outcomes[0])
            if chain is None and not isinstance(outcomes[0], RpcProblem):
                endpoint.health.failed(RpcProblem(ProblemKind.GARBLED, "invalid chain id"), time.monotonic())
        except RpcProblem:
            chain = None
        finally:
            with self._changed:
                # In any case, or the endpoint would count as being asked forever.
                self._introducing.discard(endpoint.name)
                if chain is None:
                    self._failed_checks[endpoint.name] += 1
                else:
                    endpoint.chain = self._chain_ids[endpoint.name] = chain
                    # The others' time to report begins with the first answer.
                    self._first_chain_id_at = self._first_chain_id_at or time.monotonic()
                self._agree(time.monotonic())
                self._changed.notify_all()

    def _agree(self, now: float, *, final: bool = False) -> None:
        """Without a configured chain id the majority decides; endpoints on another chain are left out."""
        if self._chain_id is None and self._chain_ids and self._first_chain_id_at is not None:
            waited = now - self._first_chain_id_at >= _AGREEMENT_SECONDS
            if final or waited or not self._introducing:
                ranked = Counter(
                    self._chain_ids[each.name] for each in self.endpoints if each.name in self._chain_ids
                )
                self._chain_id = ranked.most_common(1)[0][0]
        if self._chain_id is None:
            return
        for endpoint in self.endpoints:
            if endpoint.chain is None or endpoint.chain == self._chain_id:
                # A node that was left out may be replaced by one on the right chain.
                endpoint.left_out = None
            elif endpoint.left_out is None:
                endpoint.left_out = f"it is on chain {endpoint.chain}, not on {self._chain_id}"
                endpoint.health.last = RpcProblem(ProblemKind.LOCKED_OUT, endpoint.left_out)
                self._left_out_at[endpoint.name] = now

    def _is_known(self, endpoint: Endpoint) -> bool:
        return endpoint.chain is not None and endpoint.chain == self._chain_id

    def _is_left_out(self, endpoint: Endpoint, now: float) -> bool:
        since = self._left_out_at.get(endpoint.name)
        return endpoint.left_out is not None and since is not None and now - since < _LEFT_OUT_SECONDS


class PoolRequest:
    """``needs`` are required methods, ``prefers`` preferred ones. ``avoid`` names endpoints that are asked last.
    ``block`` is the newest block that the question is about."""

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
        self.problems: dict[str, RpcProblem] = {}
        self._spent: Counter[str] = Counter()
        self._tries: Counter[str] = Counter()
        self._paused_until: dict[str, float] = {}

    def may_ask(self, endpoint: Endpoint, now: float) -> bool:
        for method in self.needs:
            # Counted as used up, so that the question ends when no other endpoint is left.
            if endpoint.health.lacks(method, now) and endpoint.name not in self.problems:
                self.problems[endpoint.name] = RpcProblem(
                    ProblemKind.NO_METHOD, f"it has no {method}", code=-32601
                )
                self._spent[endpoint.name] = _PATIENCE
        return self._spent[endpoint.name] < _PATIENCE

    def was_asked(self, endpoint: Endpoint) -> bool:
        return self._tries[endpoint.name] > 0

    def wait(self, endpoint: Endpoint, now: float) -> float:
        """Seconds before the endpoint may be asked: its own rest, and a pause after a failure."""
        # A suspect endpoint may be asked once: it may be the only one that is left.
        suspicion = endpoint.health.suspicion(now) if self.was_asked(endpoint) else 0.0
        pause = self._paused_until.get(endpoint.name, 0.0) - now
        return max(0.0, endpoint.health.rest(now), suspicion, pause)

    def cost(self, endpoint: Endpoint, calls: int, now: float) -> float:
        """Estimated seconds until an answer, with doubts counted as time."""
        health = endpoint.health
        seconds = self.wait(endpoint, now) + endpoint.bucket.wait(calls, now)
        # An endpoint without a latency has never answered; it counts as fast, so that it is tried.
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

    def failed(self, endpoint: Endpoint, problem: RpcProblem, *, in_part: bool = False) -> None:
        """Record a failed attempt. ``in_part``: some calls were answered, and only the rest is asked again."""
        name = endpoint.name
        self.problems[name] = problem
        self._tries[name] += 1
        # An endpoint that answers a part each time makes progress and is asked on.
        if not in_part or problem.kind in _HOPELESS:
            self._spent[name] += _COST[problem.kind]
        if problem.kind is not ProblemKind.BATCH:
            # A smaller batch may be sent right away.
            pause = _PAUSE.delay(self._tries[name], jitter=spread(most=1.0))
            self._paused_until[name] = time.monotonic() + pause

    def give_up(self) -> TracelakeError:
        """The error to raise: the last problem of each endpoint, by its name."""
        kinds = {problem.kind for problem in self.problems.values()}
        # If every endpoint refuses, the question is wrong, and a retry is useless.
        if kinds and kinds <= set(_HOPELESS):
            name, problem = next(iter(self.problems.items()))
            return RpcRefused(self.what, name, problem.code, problem.text)
        return RpcUnavailable(self.what, {name: problem.text for name, problem in self.problems.items()})


class Broadcast:
    def __init__(self, selector: EndpointSelector) -> None:
        self._selector = selector
        self._lock = threading.Lock()
        self._under_way: dict[tuple[Any, ...], Awaited] = {}

    def ask(self, call: RpcCall, *, patient: bool) -> list[tuple[Endpoint, RpcOutcome]]:
        """The outcomes of usable endpoints that answered, in the order of the configuration."""
        endpoints = self._selector.wake()
        if not endpoints or patient:
            most = min(_LONGEST_SECONDS, self._selector.config.deadline_seconds)
            self._selector.check_chains(time.monotonic() + most)
            endpoints = self._selector.usable()
        began = time.monotonic()
        asked = {each: self._begin(each, call, began + _LONGEST_SECONDS) for each in endpoints}
        # An answer that is awaited for longer already isn't worth the wait without patience.
        late = began - _STRAGGLERS_SECONDS
        awaited = {answer for answer, since in asked.values() if patient or since > late}
        _wait_for(awaited, began + _LONGEST_SECONDS, patient)
        return [(each, answer.result()) for each, (answer, _) in asked.items() if answer.done()]

    def _begin(self, endpoint: Endpoint, call: RpcCall, deadline: float) -> Awaited:
        """Share one pending answer between callers with the same call, so an endpoint that hangs is asked once."""
        key = (endpoint.name, call[0], *call[1])
        with self._lock:
            # Finished answers are dropped: they are about an earlier moment.
            self._under_way = {key: each for key, each in self._under_way.items() if not each[0].done()}
            if key not in self._under_way:
                answer = self._selector.beside(partial(_ask_once, endpoint, call, deadline))
                self._under_way[key] = (answer, time.monotonic())
            return self._under_way[key]


def _ask_once(endpoint: Endpoint, call: RpcCall, deadline: float) -> RpcOutcome:
    """Make one call. These few calls count towards the rate limit, but don't wait for it."""
    endpoint.bucket.take(1, time.monotonic())
    try:
        outcomes, _ = endpoint.exchange([call], deadline, kind="single")
    except RpcProblem as problem:
        return problem
    return outcomes[0]


def _wait_for(answers: set[Future[RpcOutcome]], deadline: float, patient: bool) -> None:
    began = time.monotonic()
    while answers and (now := time.monotonic()) < deadline:
        done, answers = wait(answers, deadline - now, return_when=FIRST_COMPLETED)
        if not patient and any(not isinstance(answer.result(), RpcProblem) for answer in done):
            now = time.monotonic()
            # The others get twice the time that the first took: a far endpoint isn't a broken one.
            deadline = min(deadline, now + max(_STRAGGLERS_SECONDS, 2 * (now - began)))
