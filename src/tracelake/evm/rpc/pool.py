"""``Pool``: several endpoints of one chain, used as if they were one.

    with Pool(config) as pool:
        pool.head()                      the newest block that any of them has
        pool.header(17)                  None only if they agree that there is none
        pool.fetch(range(10, 20), receipts=True)
        pool.logs(10, 19, address=…)     ranges are halved where they are too much
        pool.call("eth_getCode", […])    anything else

A question goes to the endpoint that is expected to answer soonest, and on to the others when it fails, until it
is answered or its deadline has passed; then ``RpcUnavailable`` names the problem of each. ``null`` is an answer
and never taken for an empty one; the caller of ``call`` decides its meaning. All methods are thread-safe.
``close`` ends every wait.

``kept_pool`` keeps a pool open for a process that does many small pieces of work, as Spark's Python workers do:
the next user of the same endpoints finds warm connections and what was learnt about them. An unused pool is
closed within about a minute, with its threads, its connections and the keys in its addresses, since such a
process serves job after job.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from tracelake.domain.errors import Invalid
from tracelake.evm.profiles.profile import ChainProfile
from tracelake.evm.profiles.registry import profile_of
from tracelake.evm.raw_block import RawBlock
from tracelake.evm.rpc.blocks import BATCH_KIND, FetchedBlocks, Head, Header, Headers, fetch_some
from tracelake.evm.rpc.config import PoolConfig
from tracelake.evm.rpc.endpoint import EndpointStats, stats_of
from tracelake.evm.rpc.endpoint_selector import EndpointSelector, PoolRequest
from tracelake.evm.rpc.errors import RpcProblem, RpcUnavailable
from tracelake.evm.rpc.exchange import RpcCall, RpcOutcome
from tracelake.evm.rpc.logs import read_logs

IDLE_SECONDS = 60.0
_MOST_THREADS = 32
_MOST_IDLE = 4
_lock = threading.Lock()
"""Guards ``_kept`` and ``_sweeping``."""


class Pool:
    """``share`` is this process's part of every endpoint's rate limit, if several processes use the endpoints."""

    def __init__(self, config: PoolConfig, *, share: float = 1.0) -> None:
        self.config = config
        self.selector = EndpointSelector(config, share)
        # More threads than the endpoints accept requests would only wait.
        threads = sum(endpoint.max_concurrency for endpoint in config.endpoints)
        self.parallelism = min(threads, _MOST_THREADS)
        self._threads = ThreadPoolExecutor(self.parallelism, thread_name_prefix=f"rpc-{config.name}")
        self._headers = Headers(self)

    def chain_id(self, expected: int | None = None) -> int:
        """The configured chain id, or that of most endpoints; an endpoint on another chain is left out. Raises
        ``Invalid`` if it isn't ``expected``."""
        self.selector.check_chains(self._deadline())
        if (chain_id := self.selector.chain_id) is None or not self.selector.usable():
            raise self.no_answer("eth_chainId")
        if expected not in (None, chain_id):
            raise Invalid("WrongChain", f"pool {self.config.name!r} is of chain {chain_id}, not {expected}")
        return chain_id

    @property
    def profile(self) -> ChainProfile:
        """The chain profile that is configured, or that of the chain's id, which is known once an endpoint has
        answered."""
        return profile_of(self.config.chain, self.selector.chain_id)

    def head(self, *, patient: bool = False) -> Head:
        """The highest block of any endpoint, or with a quorum the highest that enough of them have alike. Slow
        endpoints are waited for only with ``patient``, or if they are needed for the quorum."""
        return self._headers.newest(patient=patient)

    @property
    def dissent(self) -> dict[str, str]:
        """With a quorum: the endpoints that weren't part of the last agreement on the head, and why."""
        return dict(self._headers.dissent)

    @property
    def disputed(self) -> int | None:
        """With a quorum: the block after the agreed head, if the endpoints don't agree on it."""
        return self._headers.disputed

    def known_head(self) -> int | None:
        """The highest block seen from any endpoint, without a request."""
        return max(
            (each.health.head for each in self.selector.usable() if each.health.head is not None),
            default=None,
        )

    def finalized(self) -> int | None:
        """The number of the finalized block; None if the chain or its endpoints have no such tag."""
        return self._headers.tagged("finalized")

    def safe(self) -> int | None:
        return self._headers.tagged("safe")

    def header(self, which: int | str) -> Header | None:
        """A block by number or hash, without transactions; None only if the healthy endpoints agree there is
        none. With a quorum, enough of them must have the same block at this number."""
        return self._headers.one(which)

    def headers_by_endpoint(self, number: int) -> dict[str, Header | None]:
        """The header at this height by endpoint, to distinguish a lagging endpoint from a reorg. Endpoints without
        an answer are left out."""
        return self._headers.by_endpoint(number)

    def call(self, method: str, params: Sequence[Any] = ()) -> Any:
        return self.batch([(method, params)])[0]

    def batch(self, calls: Sequence[RpcCall]) -> list[Any]:
        """The results of all calls in their order, or an error."""
        methods = {method for method, _ in calls}
        kind = methods.pop() if len(methods) == 1 else "mixed"
        question = self.question(
            kind if kind != "mixed" else f"{len(calls)} calls", needs=[m for m, _ in calls]
        )
        results: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        while left:
            with self.selector.ask(question, len(left)) as endpoint:
                asked = left[: endpoint.batch_size(kind)]
                try:
                    outcomes, _ = self.selector.exchange(endpoint, [calls[i] for i in asked], question, kind)
                except RpcProblem as problem:
                    question.failed(endpoint, problem)
                    continue
            failed = _keep(outcomes, asked, results)
            if failed:
                question.failed(endpoint, failed[0][1], in_part=len(failed) < len(asked))
            left = [index for index, _ in failed] + left[len(asked) :]
        return results

    def fetch(
        self, numbers: Sequence[int], *, receipts: bool, traces: bool = False, avoid: Iterable[str] = ()
    ) -> list[RawBlock]:
        """Whole blocks in the order of ``numbers``, unverified: ``tracelake.evm.fetch`` proves them. Block,
        receipts and traces of a block come from one endpoint; ``avoid`` names endpoints that are asked last."""
        return self.fetch_sized(numbers, receipts=receipts, traces=traces, avoid=avoid).blocks

    def fetch_sized(
        self, numbers: Sequence[int], *, receipts: bool, traces: bool, avoid: Iterable[str] = ()
    ) -> FetchedBlocks:
        return fetch_some(self, numbers, receipts=receipts, traces=traces, avoid=avoid)

    def fetch_later(self, numbers: Sequence[int], *, receipts: bool, traces: bool) -> Future[FetchedBlocks]:
        return self._threads.submit(self.fetch_sized, numbers, receipts=receipts, traces=traces)

    def logs(
        self,
        start: int,
        end: int,
        *,
        address: str | Sequence[str] | None = None,
        topics: Sequence[Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Logs of blocks ``start``–``end``, both included, in order. ``[]`` is one endpoint's claim that there
        are none; the blocks' bloom filters can contradict it."""
        return read_logs(self, start, end, address=address, topics=topics)

    def distrust(self, endpoint: str, what: str) -> None:
        """Prefer other endpoints for a while: this one gave an answer that is provably wrong."""
        for each in self.selector.endpoints:
            if each.name == endpoint:
                with each.lock:
                    each.health.distrust(what, time.monotonic())

    def stats(self) -> list[EndpointStats]:
        return [stats_of(endpoint, BATCH_KIND) for endpoint in self.selector.endpoints]

    def question(
        self,
        what: str,
        *,
        needs: Iterable[str] = (),
        prefers: Iterable[str] = (),
        avoid: Iterable[str] = (),
        block: int | None = None,
    ) -> PoolRequest:
        return PoolRequest(what, self._deadline(), needs=needs, prefers=prefers, avoid=avoid, block=block)

    def no_answer(self, what: str) -> RpcUnavailable:
        """The error for a question without an answer, with the last problem of each endpoint."""
        problems = {
            each.name: each.left_out or each.health.last_problem or "no answer in time"
            for each in self.selector.endpoints
        }
        return RpcUnavailable(what, problems)

    def close(self) -> None:
        """End every thread and close every connection before returning."""
        # First, since it wakes up every thread that waits; the shutdown below waits for them.
        self.selector.close()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self) -> float:
        return time.monotonic() + self.config.deadline_seconds


def _keep(outcomes: list[RpcOutcome], asked: list[int], results: list[Any]) -> list[tuple[int, RpcProblem]]:
    """Store results in their places; return the failures."""
    failed = []
    for index, outcome in zip(asked, outcomes, strict=True):
        if isinstance(outcome, RpcProblem):
            failed.append((index, outcome))
        else:
            results[index] = outcome
    return failed


@dataclass(slots=True)
class _Kept:
    pool: Pool
    process: int
    users: int = 0
    idle_since: float = 0.0


_kept: dict[tuple[bytes, float], _Kept] = {}
_sweeping: threading.Timer | None = None


@contextmanager
def kept_pool(config: PoolConfig, *, share: float = 1.0) -> Iterator[Pool]:
    """A pool that stays open after the block. ``share`` as for ``Pool``."""
    kept = _take(config, share)
    try:
        yield kept.pool
    finally:
        with _lock:
            kept.users -= 1
            # Under the lock: ``_forget_idle`` must not find a pool unused that another thread just takes.
            kept.idle_since = time.monotonic()
            over = _forget_idle(most=_MOST_IDLE)
            _sweep_later()
        # Outside of the lock: closing waits for threads, and other users must not.
        _close(over)


def _take(config: PoolConfig, share: float) -> _Kept:
    # The whole configuration is the key: another API key or header is another pool.
    key = (msgspec.json.encode(config, order="sorted"), share)
    with _lock:
        kept = _kept.get(key)
        if kept is None or kept.process != os.getpid():
            # After a fork the threads and connections belong to the parent process: there is nothing to close.
            kept = _kept[key] = _Kept(Pool(config, share=share), os.getpid())
        kept.users += 1
        return kept


def _forget_idle(*, most: int | None = None, since: float | None = None) -> list[_Kept]:
    """Remove pools that are idle since ``since``, or beyond the ``most`` that may be idle, the longest idle
    first."""
    idle = sorted(
        ((key, kept) for key, kept in _kept.items() if not kept.users), key=lambda each: each[1].idle_since
    )
    over = len(idle) - most if most is not None else 0
    found = [
        (key, kept)
        for place, (key, kept) in enumerate(idle)
        if place < over or (since is not None and kept.idle_since <= since)
    ]
    for key, _ in found:
        del _kept[key]
    return [kept for _, kept in found]


def _sweep_later() -> None:
    global _sweeping
    if _sweeping is None or not _sweeping.is_alive():
        _sweeping = threading.Timer(IDLE_SECONDS, _sweep)
        # A process that ends doesn't wait for the timer.
        _sweeping.daemon = True
        _sweeping.start()


def _sweep() -> None:
    global _sweeping
    with _lock:
        over = _forget_idle(since=time.monotonic() - IDLE_SECONDS)
        _sweeping = None
        if _kept:
            _sweep_later()
    _close(over)


def _close(over: list[_Kept]) -> None:
    for kept in over:
        # After a fork the threads are the parent's, and shutting
        # a socket down would cut the parent's connection too.
        if kept.process == os.getpid():
            kept.pool.close()
