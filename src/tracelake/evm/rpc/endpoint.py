"""One endpoint of a pool: its connections, its limits and its health.

``Endpoint.exchange`` is one round trip; the choice of the endpoint and the retries are the selector's. The
endpoint's own address and keys are removed from every text it returns.

``EndpointHealth`` keeps two kinds of trouble apart: a *rest* was requested by the endpoint (429) and is
respected; a *suspicion* follows failures, grows with each in a row, and only ranks the endpoint behind the
others. A method that the endpoint lacks isn't requested again for a while.

``BatchSize`` learns how many calls an endpoint accepts in one batch. It begins small and doubles while batches
succeed. After a refusal it is halved, grows slowly, and stays below the refused size for a while: a limit of
the provider stays, an overload passes.
"""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tracelake.domain.backoff import Backoff, spread
from tracelake.evm.rpc.config import EndpointConfig, parse_address
from tracelake.evm.rpc.errors import ProblemKind, RpcProblem
from tracelake.evm.rpc.exchange import EndpointResponse, HttpConnection, RpcCall, RpcOutcome, decode, encode

# Removing a shorter text would garble messages that hold it by chance.
_SHORTEST_SECRET = 4
_SUSPICION = Backoff(first=0.5, longest=30.0)
_REST = Backoff(first=0.5, longest=8.0)
_LONGEST_REST = 60.0
_LOCKED_OUT_SECONDS = 60.0
_NO_METHOD_SECONDS = 600.0
_LATENCY_WEIGHT = 0.3
"""Weight of the newest latency in the running average."""
_WHOLE_ENDPOINT = (
    ProblemKind.TRANSPORT,
    ProblemKind.TIMEOUT,
    ProblemKind.SERVER,
    ProblemKind.GARBLED,
    ProblemKind.LOCKED_OUT,
)
FIRST_BATCH = 16
_STEADY_BATCHES = 8
"""Number of batches in a row that succeed before a size is raised that was refused before."""
_REFUSAL_SECONDS = 600.0


class Endpoint:
    """``lock`` guards counters and everything learnt. ``chain`` is the chain id that the endpoint reported, and
    ``left_out`` the reason why it must not be used."""

    def __init__(self, config: EndpointConfig, share: float) -> None:
        self.config = config
        self.name = config.name
        self.lock = threading.Lock()
        self.health = EndpointHealth()
        self.in_flight = 0
        self.chain: int | None = None
        self.left_out: str | None = None
        rate = config.requests_per_second
        self.bucket = TokenBucket(None if rate is None else rate * share, time.monotonic())
        # A batch counts as its calls: one that is larger than the bucket would always be over the rate.
        self._most = min(config.max_batch, self.bucket.most or config.max_batch)
        self._sizes: dict[str, BatchSize] = {}
        self._ids = itertools.count(1)
        self._address = parse_address(config.url)
        self._tls: ssl.SSLContext | None = None
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._closed = False
        secrets = {text for text in config.secrets() if len(text) >= _SHORTEST_SECRET}
        # The longest first: a secret may contain another.
        self._secrets = sorted(secrets, key=len, reverse=True)

    def batch_size(self, method: str) -> int:
        with self.lock:
            return self._size(method).size

    def exchange(
        self, calls: Sequence[RpcCall], deadline: float, *, kind: str
    ) -> tuple[list[RpcOutcome], int]:
        """Send one request; return an outcome per call and the size of the answer. Raises ``RpcProblem`` when the
        request failed as a whole. Batch sizes are learnt for each ``kind``."""
        began = time.monotonic()
        deadline = min(deadline, began + self.config.timeout_seconds)
        # Ids of requests don't overlap, so a late answer to an earlier one is recognised.
        first_id = next(self._ids) * 100_000
        try:
            answer = self._post(encode(calls, first_id), deadline)
            outcomes = _decoded(answer, calls, first_id)
        except RpcProblem as problem:
            raise self._failed(problem, len(calls), kind) from None
        self._succeeded(calls, outcomes, began, len(answer.body), kind)
        return outcomes, len(answer.body)

    def scrub(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text

    def close(self) -> None:
        """Close all connections. Callers that wait for an answer fail at once."""
        with self.lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            # A busy connection belongs to its thread, which closes it after the abort.
            connection.abort()

    def _post(self, body: bytes, deadline: float) -> EndpointResponse:
        """Retry once on a new connection: the other side may have closed an idle one, which is no failure."""
        connection = self._take()
        reused = connection.used
        try:
            try:
                return connection.post(body, deadline)
            except RpcProblem as problem:
                if not reused or problem.kind is not ProblemKind.TRANSPORT or self._closed:
                    raise
            connection = self._swap(connection)
            return connection.post(body, deadline)
        finally:
            self._give_back(connection)

    def _take(self) -> HttpConnection:
        with self.lock:
            if self._closed:
                raise RpcProblem(ProblemKind.TRANSPORT, "the pool is closed")
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
        self, calls: Sequence[RpcCall], outcomes: list[RpcOutcome], began: float, size: int, kind: str
    ) -> None:
        now = time.monotonic()
        problems = [(index, each) for index, each in enumerate(outcomes) if type(each) is RpcProblem]
        with self.lock:
            # A request of which every call failed is no sign of health.
            if len(problems) < len(calls):
                self.health.answered(now - began, len(calls), size)
            if not problems:
                self._size(kind).went_well(len(calls), now)
            # A hundred calls that fail for the same reason count as one failure.
            alike: dict[ProblemKind, RpcProblem] = {}
            for index, problem in problems:
                problem = outcomes[index] = self._scrubbed(problem)
                alike.setdefault(problem.kind, problem)
                if problem.kind is ProblemKind.NO_METHOD:
                    self.health.has_no(calls[index][0], now)
            for problem in alike.values():
                self.health.failed(problem, now)
            if any(problem.kind is ProblemKind.BATCH for _, problem in problems):
                self._size(kind).refused(len(calls), now, limit=True)

    def _failed(self, problem: RpcProblem, calls: int, kind: str) -> RpcProblem:
        problem = self._scrubbed(problem)
        now = time.monotonic()
        with self.lock:
            # A smaller batch may be answered in time, so a timeout counts as a refusal of this size.
            if calls > 1 and problem.kind in (ProblemKind.BATCH, ProblemKind.TIMEOUT, ProblemKind.TOO_MUCH):
                self._size(kind).refused(calls, now, limit=problem.kind is ProblemKind.BATCH)
            self.health.failed(problem, now)
            if problem.kind in (ProblemKind.TRANSPORT, ProblemKind.LOCKED_OUT):
                # Another node may listen at this address when it is back, so its chain is checked again.
                self.chain = None
        return problem

    def _scrubbed(self, problem: RpcProblem) -> RpcProblem:
        problem.text = self.scrub(problem.text)
        # The text of an exception comes from ``args``, which would still have the key.
        problem.args = (problem.text,)
        return problem

    def _size(self, kind: str) -> BatchSize:
        if kind not in self._sizes:
            self._sizes[kind] = BatchSize(self._most)
        return self._sizes[kind]


def _decoded(answer: EndpointResponse, calls: Sequence[RpcCall], first_id: int) -> list[RpcOutcome]:
    try:
        return decode(answer, calls, first_id)
    except RecursionError:
        # An endpoint must not end the thread by its JSON.
        raise RpcProblem(ProblemKind.GARBLED, "an answer that is nested too deeply") from None
    except MemoryError:
        raise RpcProblem(ProblemKind.TOO_MUCH, "an answer too large for the memory here") from None


@dataclass(slots=True)
class EndpointHealth:
    """Counters, the running latency, the highest known block, and whether the endpoint rests or is suspect."""

    latency: float | None = None
    head: int | None = None
    requests: int = 0
    calls: int = 0
    bytes: int = 0
    failures: int = 0
    rate_limited: int = 0
    mismatches: int = 0
    last: RpcProblem | None = None
    _in_a_row: int = 0
    _rests_in_a_row: int = 0
    _suspect_until: float = 0.0
    _rest_until: float = 0.0
    _missing: dict[str, float] = field(default_factory=dict)

    def answered(self, seconds: float, calls: int, size: int) -> None:
        self.requests += 1
        self.calls += calls
        self.bytes += size
        self.latency = (
            seconds if self.latency is None else self.latency + _LATENCY_WEIGHT * (seconds - self.latency)
        )
        self._in_a_row = 0
        self._rests_in_a_row = 0
        self._suspect_until = 0.0

    def failed(self, problem: RpcProblem, now: float) -> None:
        """Record the failure of a request or a call. A problem of one call alone doesn't count against the
        endpoint."""
        self.last = problem
        if problem.kind is ProblemKind.RATE_LIMITED:
            self._rest(problem.retry_after, now)
        elif problem.kind in _WHOLE_ENDPOINT:
            self.failures += 1
            # A 503 may ask for a pause as well.
            if problem.retry_after is not None:
                self._rest(problem.retry_after, now)
            self._suspect(now, _LOCKED_OUT_SECONDS if problem.kind is ProblemKind.LOCKED_OUT else None)

    def distrust(self, what: str, now: float) -> None:
        self.mismatches += 1
        self.last = RpcProblem(ProblemKind.GARBLED, what)
        self._suspect(now, None)

    @property
    def last_problem(self) -> str | None:
        return None if self.last is None else self.last.text

    def lacks(self, method: str, now: float) -> bool:
        """Whether the endpoint recently reported that it has no such method."""
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
        """Record that the endpoint has this block."""
        if self.head is None or number > self.head:
            self.head = number

    def suspicion(self, now: float) -> float:
        """Seconds for which other endpoints are preferred."""
        return max(0.0, self._suspect_until - now)

    def rest(self, now: float) -> float:
        """Seconds for which the endpoint asked not to be called."""
        return max(0.0, self._rest_until - now)

    def _suspect(self, now: float, seconds: float | None) -> None:
        self._in_a_row += 1
        seconds = seconds or _SUSPICION.delay(self._in_a_row)
        # Random, so that callers that failed together don't come back together.
        self._suspect_until = max(self._suspect_until, now + seconds * spread(most=1.0))

    def _rest(self, asked: float | None, now: float) -> None:
        self.rate_limited += 1
        self._rests_in_a_row += 1
        # Bounded: an endpoint that asks for a day would be lost for all that time.
        seconds = _REST.delay(self._rests_in_a_row) if asked is None else min(asked, _LONGEST_REST)
        self._rest_until = max(self._rest_until, now + seconds)


class TokenBucket:
    """A rate limit: ``per_second`` calls, and a second's worth of them at once. Times are arguments, for tests."""

    def __init__(self, per_second: float | None, now: float) -> None:
        self._rate = per_second
        # At least one call: a rate below one per second would otherwise allow batches of none.
        self._room = max(1.0, per_second or 0.0)
        self._tokens = self._room
        self._at = now
        self._lock = threading.Lock()

    @property
    def most(self) -> int | None:
        """Maximum number of calls at once; None without a limit."""
        return None if self._rate is None else int(self._room)

    def wait(self, calls: int, now: float) -> float:
        """Seconds until this number of calls is allowed, if no other caller makes any."""
        with self._lock:
            return self._wait(calls, now)

    def take(self, calls: int, now: float) -> float:
        """Reserve calls; return the seconds to wait before making them. Callers are served in order."""
        with self._lock:
            wait = self._wait(calls, now)
            # May become negative: the next caller waits behind this one, so calls are served in order.
            self._tokens -= calls
            return wait

    def _wait(self, calls: int, now: float) -> float:
        if self._rate is None:
            return 0.0
        if now > self._at:
            self._tokens = min(self._room, self._tokens + (now - self._at) * self._rate)
            self._at = now
        # More calls than the bucket holds would never be allowed: they wait for a full one.
        short = min(calls, self._room) - self._tokens
        return max(0.0, short / self._rate)


class BatchSize:
    """The number of calls for the next batch of one kind; never more than ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = min(FIRST_BATCH, most)
        self._well = 0
        self._refused: int | None = None
        self._refused_at = 0.0
        self._halved = False

    @property
    def size(self) -> int:
        return self._size

    def went_well(self, calls: int, now: float) -> None:
        # A smaller batch than allowed shows nothing about the limit.
        if calls < self._size or self._size >= self._ceiling(now):
            return
        self._well += 1
        if not self._halved:
            self._size *= 2
        elif self._well >= _STEADY_BATCHES:
            self._well = 0
            self._size += max(1, self._size // 10)
        self._size = min(self._size, self._ceiling(now))

    def refused(self, calls: int, now: float, *, limit: bool) -> None:
        """Halve the size. ``limit``: the endpoint refused the number of calls, rather than timing out."""
        self._halved = True
        self._well = 0
        self._size = max(1, min(self._size, calls) // 2)
        if limit and calls > 1:
            self._refused = calls if self._refused is None else min(calls, self._refused)
            self._refused_at = now

    def _ceiling(self, now: float) -> int:
        if self._refused is not None and now - self._refused_at > _REFUSAL_SECONDS:
            self._refused = None
        return self._most if self._refused is None else min(self._most, self._refused - 1)


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """Counters of an endpoint, for people and metrics. ``state``: ``ok``, ``suspect`` after failures,
    ``resting`` because of a rate limit, ``left out`` if it is on another chain, ``unknown`` before its first
    answer. ``latency`` is in seconds."""

    name: str
    state: str
    chain_id: int | None
    head: int | None
    latency: float | None
    requests: int
    calls: int
    bytes: int
    failures: int
    rate_limited: int
    mismatches: int
    batch: int
    missing_methods: tuple[str, ...]
    last_problem: str | None


def stats_of(endpoint: Endpoint, batch_kind: str) -> EndpointStats:
    now = time.monotonic()
    batch = endpoint.batch_size(batch_kind)
    with endpoint.lock:
        health = endpoint.health
        return EndpointStats(
            name=endpoint.name,
            state=_state(endpoint, now),
            chain_id=endpoint.chain,
            head=health.head,
            latency=health.latency,
            requests=health.requests,
            calls=health.calls,
            bytes=health.bytes,
            failures=health.failures,
            rate_limited=health.rate_limited,
            mismatches=health.mismatches,
            batch=batch,
            missing_methods=tuple(health.missing(now)),
            last_problem=health.last_problem,
        )


def _state(endpoint: Endpoint, now: float) -> str:
    if endpoint.left_out is not None:
        return "left out"
    if endpoint.health.rest(now):
        return "resting"
    if endpoint.health.suspicion(now):
        return "suspect"
    return "unknown" if endpoint.chain is None else "ok"
