"""``Pool``: several endpoints of one chain, asked as if they were one.

    with Pool(config) as pool:
        pool.head()                      the newest block that any of them has
        pool.header(17)                  None only if they agree that there is none
        pool.fetch(range(10, 20), receipts=True)
        pool.logs(10, 19, address=…)     ranges are halved where they are too much
        pool.call("eth_getCode", […])    anything else

A question goes to the endpoint that is expected to answer soonest, and on to the others when it fails, until it is
answered or its deadline is over; then ``RpcUnavailable`` says what was wrong with each. ``null`` is an answer here,
and never taken for an empty one; what it means is for the caller of ``call`` to say. Everything may be called from
several threads at once. ``close`` ends whatever waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tracelake.domain.errors import Invalid
from tracelake.evm.raw_block import RawBlock
from tracelake.evm.rpc.blocks import BATCH_KIND, Fetched, fetch_some
from tracelake.evm.rpc.config import PoolConfig
from tracelake.evm.rpc.errors import RpcUnavailable
from tracelake.evm.rpc.exchange import Call, Outcome
from tracelake.evm.rpc.headers import Head, Header, Headers
from tracelake.evm.rpc.logs import read_logs
from tracelake.evm.rpc.problem import Problem
from tracelake.evm.rpc.question import Question
from tracelake.evm.rpc.roster import Roster
from tracelake.evm.rpc.stats import EndpointStats, stats_of

_MOST_THREADS = 32


class Pool:
    """``share`` is this process's part of every endpoint's rate limit, when several processes use it at once."""

    def __init__(self, config: PoolConfig, *, share: float = 1.0) -> None:
        self.config = config
        self.roster = Roster(config, share)
        threads = sum(endpoint.max_concurrency for endpoint in config.endpoints)
        self.parallelism = min(threads, _MOST_THREADS)
        self._threads = ThreadPoolExecutor(self.parallelism, thread_name_prefix=f"rpc-{config.name}")
        self._headers = Headers(self)

    def chain_id(self, expected: int | None = None) -> int:
        """What the endpoints say, and the configuration if it says it; one on another chain is left out. Refuses if
        it isn't the one that is ``expected``."""
        self.roster.introduce_all(self._deadline())
        if (chain_id := self.roster.chain_id) is None or not self.roster.usable():
            raise self.nobody_answers("eth_chainId")
        if expected not in (None, chain_id):
            raise Invalid("WrongChain", f"pool {self.config.name!r} is of chain {chain_id}, not {expected}")
        return chain_id

    def head(self, *, patient: bool = False) -> Head:
        """The highest of what the endpoints say; one that takes long is waited for only with ``patient``."""
        return self._headers.newest(patient=patient)

    def known_head(self) -> int | None:
        """The highest block that any endpoint was seen to have, without asking."""
        return max(
            (each.health.head for each in self.roster.usable() if each.health.head is not None), default=None
        )

    def finalized(self) -> int | None:
        """None when the chain or its endpoints know no such thing."""
        return self._headers.tagged("finalized")

    def safe(self) -> int | None:
        return self._headers.tagged("safe")

    def header(self, which: int | str) -> Header | None:
        """By number or by hash, without transactions; None only if the healthy endpoints agree there is none."""
        return self._headers.one(which)

    def headers_by_endpoint(self, number: int) -> dict[str, Header | None]:
        """What each endpoint has at this height; one that gives no answer is left out. Tells an endpoint that lags
        from a chain that changed."""
        return self._headers.by_endpoint(number)

    def call(self, method: str, params: Sequence[Any] = ()) -> Any:
        return self.batch([(method, params)])[0]

    def batch(self, calls: Sequence[Call]) -> list[Any]:
        """The results in the order of the calls: all of them, or an error."""
        methods = {method for method, _ in calls}
        kind = methods.pop() if len(methods) == 1 else "mixed"
        question = self.question(
            kind if kind != "mixed" else f"{len(calls)} calls", needs=[m for m, _ in calls]
        )
        results: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        while left:
            with self.roster.ask(question, len(left)) as endpoint:
                asked = left[: endpoint.batch_size(kind)]
                try:
                    outcomes, _ = self.roster.exchange(endpoint, [calls[i] for i in asked], question, kind)
                except Problem as problem:
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
        """Whole blocks in the order asked for, unverified: ``tracelake.evm.fetch`` proves them. Block, receipts
        and traces of a block come from one endpoint; ``avoid`` names those that are asked last."""
        return self.fetch_sized(numbers, receipts=receipts, traces=traces, avoid=avoid).blocks

    def fetch_sized(
        self, numbers: Sequence[int], *, receipts: bool, traces: bool, avoid: Iterable[str] = ()
    ) -> Fetched:
        return fetch_some(self, numbers, receipts=receipts, traces=traces, avoid=avoid)

    def fetch_later(self, numbers: Sequence[int], *, receipts: bool, traces: bool) -> Future[Fetched]:
        return self._threads.submit(self.fetch_sized, numbers, receipts=receipts, traces=traces)

    def logs(
        self,
        start: int,
        end: int,
        *,
        address: str | Sequence[str] | None = None,
        topics: Sequence[Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Of blocks ``start``–``end``, both included, in order. ``[]`` is an endpoint's word that there are none,
        which the blocks' blooms can contradict."""
        return read_logs(self, start, end, address=address, topics=topics)

    def distrust(self, endpoint: str, what: str) -> None:
        """It gave an answer that is provably wrong: the others come first for a while."""
        for each in self.roster.endpoints:
            if each.name == endpoint:
                with each.lock:
                    each.health.lied(what, time.monotonic())

    def stats(self) -> list[EndpointStats]:
        return [stats_of(endpoint, BATCH_KIND) for endpoint in self.roster.endpoints]

    def question(
        self,
        what: str,
        *,
        needs: Iterable[str] = (),
        prefers: Iterable[str] = (),
        avoid: Iterable[str] = (),
        block: int | None = None,
    ) -> Question:
        return Question(what, self._deadline(), needs=needs, prefers=prefers, avoid=avoid, block=block)

    def nobody_answers(self, what: str) -> RpcUnavailable:
        """The error that says what is known of each endpoint."""
        said = {
            each.name: each.left_out or each.health.last_problem or "no answer in time"
            for each in self.roster.endpoints
        }
        return RpcUnavailable(what, said)

    def close(self) -> None:
        """Every thread has ended, and every connection is closed, on return."""
        self.roster.close()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self) -> float:
        return time.monotonic() + self.config.deadline_seconds


def _keep(outcomes: list[Outcome], asked: list[int], results: list[Any]) -> list[tuple[int, Problem]]:
    """Put results where they belong; what is left are the failures."""
    failed = []
    for index, outcome in zip(asked, outcomes, strict=True):
        if isinstance(outcome, Problem):
            failed.append((index, outcome))
        else:
            results[index] = outcome
    return failed
