"""Who answers next: the pool's endpoints, who of them may be used, and how their work is shared out.

An endpoint is given work only after it has said which chain it is on. That question goes out to all of them at
once and in the background, so that one that hangs holds nobody up. Of those that may be asked, the one that is
expected to answer soonest is chosen; a doubt counts as time, so the choice is the same for the same state.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tracelake.evm.rpc.config import PoolConfig
from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.errors import RpcUnavailable
from tracelake.evm.rpc.exchange import Call, Outcome
from tracelake.evm.rpc.problem import Kind, Problem
from tracelake.evm.rpc.quantity import read_quantity
from tracelake.evm.rpc.question import Question

_INTRODUCTION_SECONDS = 5.0
_AGREEMENT_SECONDS = 1.0
"""Without a chain id in the configuration: how long the others have after the first one has said its own."""
_LEFT_OUT_SECONDS = 60.0
_LONGEST_WAIT = 1.0


class Roster:
    def __init__(self, config: PoolConfig, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError("share is a part of the whole: more than 0, at most 1")
        self.config = config
        self.endpoints = [Endpoint(each, share) for each in config.endpoints]
        self._changed = threading.Condition()
        self._side = ThreadPoolExecutor(2 * len(self.endpoints), thread_name_prefix=f"rpc-{config.name}-side")
        self._introducing: set[str] = set()
        self._said: dict[str, int] = {}
        self._first_said_at: float | None = None
        self._left_out_at: dict[str, float] = {}
        self._chain_id = config.chain_id
        self._failed_introductions: Counter[str] = Counter()
        self.closed = threading.Event()

    @property
    def chain_id(self) -> int | None:
        return self._chain_id

    @contextmanager
    def ask(self, question: Question, calls: int) -> Iterator[Endpoint]:
        """The endpoint to ask about so many calls, kept from too many questions at once. Raises when nobody is
        left to ask."""
        endpoint = self._acquire(question, calls)
        try:
            yield endpoint
        finally:
            with self._changed:
                endpoint.in_flight -= 1
                self._changed.notify_all()

    def exchange(
        self, endpoint: Endpoint, calls: Sequence[Call], question: Question, kind: str
    ) -> tuple[list[Outcome], int]:
        """One round trip within the endpoint's rate and the question's deadline. Raises ``Problem``."""
        wait = endpoint.bucket.take(len(calls), time.monotonic())
        if wait > 0:
            # Waiting for one's own limit, in a queue that moves on, is no sign of anything being wrong.
            question.deadline += wait
            self.pause(wait)
        return endpoint.exchange(calls, question.deadline, kind=kind)

    def usable(self) -> list[Endpoint]:
        """Those known to be on the right chain."""
        return [endpoint for endpoint in self.endpoints if self._is_known(endpoint)]

    def wake(self) -> list[Endpoint]:
        """Those that may be used, while the others are asked which chain they are on."""
        now = time.monotonic()
        with self._changed:
            for endpoint in self.endpoints:
                if not self._is_left_out(endpoint, now) and not endpoint.health.suspicion(now):
                    self._introduce(endpoint)
        return self.usable()

    def introduce_all(self, deadline: float) -> None:
        """Until each one has said its chain, or failed to. While some can be used, those that failed just now are
        left in peace."""
        if not self.wake():
            with self._changed:
                for endpoint in self.endpoints:
                    self._introduce(endpoint)
        with self._changed:
            while self._introducing and not self.closed.is_set() and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
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

    def _acquire(self, question: Question, calls: int) -> Endpoint:
        base = Counter(self._failed_introductions)
        with self._changed:
            while True:
                now = time.monotonic()
                if self.closed.is_set():
                    raise RpcUnavailable(question.what, {self.config.name: "the pool is closed"})
                if now >= question.deadline:
                    self._blame_silence(question)
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
                self._changed.wait(min(question.deadline - now, max(wait or _LONGEST_WAIT, 0.001)))
                if busy:
                    # Those before us are under deadlines of their own.
                    question.deadline += time.monotonic() - now

    def _seek(self, question: Question, now: float) -> float | None:
        """Have those introduced that aren't. Seconds until another may be, None when nobody else is there."""
        waits: list[float] = []
        for endpoint in self.endpoints:
            if self._is_known(endpoint) or not question.may_ask(endpoint, now):
                continue
            if endpoint.name in self._introducing or (endpoint.chain is not None and self._chain_id is None):
                waits.append(_LONGEST_WAIT)
                continue
            suspicion = max(endpoint.health.suspicion(now), endpoint.health.rest(now))
            if self._is_left_out(endpoint, now):
                self._tell(question, endpoint)
            elif suspicion > 0 and (question.was_asked(endpoint) or self.usable()):
                waits.append(suspicion)
            else:
                self._introduce(endpoint)
                waits.append(_LONGEST_WAIT)
        return min(waits, default=None)

    def _blame_silence(self, question: Question) -> None:
        for endpoint in self.endpoints:
            if endpoint.name not in question.problems:
                said = endpoint.left_out or endpoint.health.last_problem or "no answer before the deadline"
                question.problems[endpoint.name] = Problem(Kind.TIMEOUT, said)

    def _tell(self, question: Question, endpoint: Endpoint) -> None:
        question.problems[endpoint.name] = Problem(Kind.LOCKED_OUT, endpoint.left_out or "left out")

    def _note_failures(self, question: Question, base: Counter[str]) -> None:
        """A failed introduction is a failed try for everybody who waits for it."""
        for endpoint in self.endpoints:
            for _ in range(self._failed_introductions[endpoint.name] - base[endpoint.name]):
                question.failed(endpoint, endpoint.health.last or Problem(Kind.TRANSPORT, "no answer"))
            base[endpoint.name] = self._failed_introductions[endpoint.name]

    def _introduce(self, endpoint: Endpoint) -> None:
        if endpoint.name in self._introducing or self.closed.is_set() or self._is_known(endpoint):
            return
        self._introducing.add(endpoint.name)
        endpoint.chain = None
        self._side.submit(self._ask_chain, endpoint)

    def _ask_chain(self, endpoint: Endpoint) -> None:
        chain: int | None = None
        try:
            deadline = time.monotonic() + _INTRODUCTION_SECONDS
            outcomes, _ = endpoint.exchange([("eth_chainId", [])], deadline, kind="single")
            chain = read_quantity(outcomes[0])
            if chain is None and not isinstance(outcomes[0], Problem):
                endpoint.health.failed(Problem(Kind.GARBLED, "its chain id is no number"), time.monotonic())
        except Problem:
            chain = None
        finally:
            with self._changed:
                self._introducing.discard(endpoint.name)
                if chain is None:
                    self._failed_introductions[endpoint.name] += 1
                else:
                    endpoint.chain = self._said[endpoint.name] = chain
                    self._first_said_at = self._first_said_at or time.monotonic()
                self._agree(time.monotonic())
                self._changed.notify_all()

    def _agree(self, now: float, *, final: bool = False) -> None:
        """Without a chain id in the configuration most of them decide; those on another chain are left out."""
        if self._chain_id is None and self._said and self._first_said_at is not None:
            waited = now - self._first_said_at >= _AGREEMENT_SECONDS
            if final or waited or not self._introducing:
                ranked = Counter(self._said[each.name] for each in self.endpoints if each.name in self._said)
                self._chain_id = ranked.most_common(1)[0][0]
        if self._chain_id is None:
            return
        for endpoint in self.endpoints:
            if endpoint.chain is None or endpoint.chain == self._chain_id:
                endpoint.left_out = None
            elif endpoint.left_out is None:
                endpoint.left_out = f"it is on chain {endpoint.chain}, not on {self._chain_id}"
                endpoint.health.last = Problem(Kind.LOCKED_OUT, endpoint.left_out)
                self._left_out_at[endpoint.name] = now

    def _is_known(self, endpoint: Endpoint) -> bool:
        return endpoint.chain is not None and endpoint.chain == self._chain_id

    def _is_left_out(self, endpoint: Endpoint, now: float) -> bool:
        since = self._left_out_at.get(endpoint.name)
        return endpoint.left_out is not None and since is not None and now - since < _LEFT_OUT_SECONDS
