"""One endpoint: its connections, its limits, and what is known of it.

``exchange`` is one round trip and no more; who to ask, and what to do when it fails, is the pool's business. What
an endpoint says is scrubbed of its own address and keys before anybody sees it.
"""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections.abc import Sequence

from tracelake.evm.rpc.address import parse_address
from tracelake.evm.rpc.batch_size import BatchSize
from tracelake.evm.rpc.config import EndpointConfig
from tracelake.evm.rpc.exchange import Call, Outcome, decode, encode
from tracelake.evm.rpc.health import Health
from tracelake.evm.rpc.http_answer import HttpAnswer
from tracelake.evm.rpc.http_connection import HttpConnection
from tracelake.evm.rpc.problem import Kind, Problem
from tracelake.evm.rpc.token_bucket import TokenBucket

_SHORTEST_SECRET = 4


class Endpoint:
    """``lock`` guards everything that is counted or learnt. ``chain`` is the chain id it was found on, and
    ``left_out`` why it isn't to be used at all."""

    def __init__(self, config: EndpointConfig, share: float) -> None:
        self.config = config
        self.name = config.name
        self.lock = threading.Lock()
        self.health = Health()
        self.in_flight = 0
        self.chain: int | None = None
        self.left_out: str | None = None
        rate = config.requests_per_second
        self.bucket = TokenBucket(None if rate is None else rate * share, time.monotonic())
        self._most = min(config.max_batch, self.bucket.most or config.max_batch)
        self._sizes: dict[str, BatchSize] = {}
        self._ids = itertools.count(1)
        self._address = parse_address(config.url)
        self._tls: ssl.SSLContext | None = None
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._closed = False
        secrets = {text for text in config.secrets() if len(text) >= _SHORTEST_SECRET}
        self._secrets = sorted(secrets, key=len, reverse=True)

    def batch_size(self, method: str) -> int:
        with self.lock:
            return self._size(method).size

    def exchange(self, calls: Sequence[Call], deadline: float, *, kind: str) -> tuple[list[Outcome], int]:
        """One request, and the bytes of its answer. Raises ``Problem`` when it failed as a whole. ``kind`` is what
        the size of batches is learnt under."""
        began = time.monotonic()
        deadline = min(deadline, began + self.config.timeout_seconds)
        first_id = next(self._ids) * 100_000
        try:
            answer = self._post(encode(calls, first_id), deadline)
            outcomes = _decoded(answer, calls, first_id)
        except Problem as problem:
            raise self._failed(problem, len(calls), kind) from None
        self._succeeded(calls, outcomes, began, len(answer.body), kind)
        return outcomes, len(answer.body)

    def scrub(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text

    def close(self) -> None:
        """Whatever waits for an answer fails at once."""
        with self.lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.abort()

    def _post(self, body: bytes, deadline: float) -> HttpAnswer:
        """A kept connection may have been closed by the other side meanwhile: that is no failure of anybody."""
        connection = self._take()
        reused = connection.used
        try:
            try:
                return connection.post(body, deadline)
            except Problem as problem:
                if not reused or problem.kind is not Kind.TRANSPORT or self._closed:
                    raise
            connection = self._swap(connection)
            return connection.post(body, deadline)
        finally:
            self._give_back(connection)

    def _take(self) -> HttpConnection:
        with self.lock:
            if self._closed:
                raise Problem(Kind.TRANSPORT, "the pool is closed")
            connection = self._idle.pop() if self._idle else self._new()
            self._busy.add(connection)
            return connection

    def _swap(self, broken: HttpConnection) -> HttpConnection:
        with self.lock:
            self._busy.discard(broken)
            connection = self._new()
            self._busy.add(connection)
            return connection

    def _new(self) -> HttpConnection:
        if self._address.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return HttpConnection(self._address, self.config.headers, self._tls)

    def _give_back(self, connection: HttpConnection) -> None:
        with self.lock:
            self._busy.discard(connection)
            if connection.is_open and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _succeeded(
        self, calls: Sequence[Call], outcomes: list[Outcome], began: float, size: int, kind: str
    ) -> None:
        now = time.monotonic()
        problems = [(index, each) for index, each in enumerate(outcomes) if type(each) is Problem]
        with self.lock:
            if len(problems) < len(calls):
                self.health.answered(now - began, len(calls), size)
            if not problems:
                self._size(kind).went_well(len(calls), now)
            # A hundred calls that fail alike are one bad experience.
            alike: dict[Kind, Problem] = {}
            for index, problem in problems:
                problem = outcomes[index] = self._scrubbed(problem)
                alike.setdefault(problem.kind, problem)
                if problem.kind is Kind.NO_METHOD:
                    self.health.has_no(calls[index][0], now)
            for problem in alike.values():
                self.health.failed(problem, now)
            if any(problem.kind is Kind.BATCH for _, problem in problems):
                self._size(kind).refused(len(calls), now, limit=True)

    def _failed(self, problem: Problem, calls: int, kind: str) -> Problem:
        problem = self._scrubbed(problem)
        now = time.monotonic()
        with self.lock:
            if calls > 1 and problem.kind in (Kind.BATCH, Kind.TIMEOUT, Kind.TOO_MUCH):
                self._size(kind).refused(calls, now, limit=problem.kind is Kind.BATCH)
            self.health.failed(problem, now)
            if problem.kind in (Kind.TRANSPORT, Kind.LOCKED_OUT):
                # Something else may listen there when it is back.
                self.chain = None
        return problem

    def _scrubbed(self, problem: Problem) -> Problem:
        problem.text = self.scrub(problem.text)
        problem.args = (problem.text,)
        return problem

    def _size(self, kind: str) -> BatchSize:
        if kind not in self._sizes:
            self._sizes[kind] = BatchSize(self._most)
        return self._sizes[kind]


def _decoded(answer: HttpAnswer, calls: Sequence[Call], first_id: int) -> list[Outcome]:
    try:
        return decode(answer, calls, first_id)
    except RecursionError:
        raise Problem(Kind.GARBLED, "an answer that is nested too deeply") from None
    except MemoryError:
        raise Problem(Kind.TOO_MUCH, "an answer too large for the memory here") from None
