"""What each endpoint of a pool is like, by asking it: for people who set one up.

Endpoints are asked side by side and each on its own, without the pool's retries: here a failure is the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tracelake.evm.rpc.config import EndpointConfig, PoolConfig
from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.exchange import Call
from tracelake.evm.rpc.problem import Kind, Problem
from tracelake.evm.rpc.quantity import read_quantity

_NOTHING = "0x" + "00" * 32
_LATENCY_CALLS = 3
METHODS = (
    "eth_getBlockReceipts",
    "eth_getTransactionReceipt",
    "eth_getLogs",
    "trace_block",
    "finalized",
    "safe",
)
"""Methods, and the two names of blocks that not every chain has."""


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """``latency`` in seconds, the best of a few. ``lag`` is how many blocks it is behind the furthest of its pool.
    ``problem`` says why it can't be used, or what is odd about it."""

    name: str
    reachable: bool
    usable: bool
    chain_id: int | None = None
    head: int | None = None
    lag: int | None = None
    latency: float | None = None
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    batch: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PoolReport:
    pool: str
    chain_id: int | None
    endpoints: list[EndpointReport] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return any(endpoint.usable for endpoint in self.endpoints)


def probe_pool(config: PoolConfig) -> PoolReport:
    with ThreadPoolExecutor(len(config.endpoints)) as threads:
        reports = list(threads.map(partial(_probe, config.deadline_seconds), config.endpoints))
    said = [report.chain_id for report in reports if report.chain_id is not None]
    chain_id = config.chain_id or max(said, key=said.count, default=None)
    on_it = [report for report in reports if report.chain_id == chain_id]
    newest = max((report.head for report in on_it if report.head is not None), default=None)
    return PoolReport(config.name, chain_id, [_compared(report, chain_id, newest) for report in reports])


def _compared(report: EndpointReport, chain_id: int | None, newest: int | None) -> EndpointReport:
    if report.chain_id is not None and report.chain_id != chain_id:
        problem = f"it is on chain {report.chain_id}, not on {chain_id}"
        return replace(report, usable=False, problem=problem)
    lag = None if newest is None or report.head is None else newest - report.head
    return replace(report, lag=lag)


def _probe(patience: float, config: EndpointConfig) -> EndpointReport:
    endpoint = Endpoint(config, 1.0)
    deadline = time.monotonic() + patience
    try:
        chain_id = _number(endpoint, ("eth_chainId", ()), deadline)
        latency = min(_timed(endpoint, deadline) for _ in range(_LATENCY_CALLS))
        head = _number(endpoint, ("eth_blockNumber", ()), deadline)
        has = tuple(name for name in METHODS if _has(endpoint, name, head, deadline))
        batch = _batch(endpoint, config.max_batch, deadline)
    except Problem as problem:
        reachable = problem.kind not in (Kind.TRANSPORT, Kind.TIMEOUT)
        return EndpointReport(config.name, reachable, usable=False, problem=problem.text)
    finally:
        endpoint.close()
    return EndpointReport(
        config.name,
        reachable=True,
        usable=True,
        chain_id=chain_id,
        head=head,
        latency=latency,
        has=has,
        lacks=tuple(name for name in METHODS if name not in has),
        batch=batch,
        problem=None
        if batch == config.max_batch
        else f"{config.max_batch} calls at once are too many; {batch} aren't",
    )


def _ask(endpoint: Endpoint, calls: Sequence[Call], deadline: float) -> list[Any]:
    wait = endpoint.bucket.take(len(calls), time.monotonic())
    time.sleep(min(wait, max(0.0, deadline - time.monotonic())))
    return endpoint.exchange(calls, deadline, kind="probe")[0]


def _number(endpoint: Endpoint, call: Call, deadline: float) -> int:
    [outcome] = _ask(endpoint, [call], deadline)
    if isinstance(outcome, Problem):
        raise outcome
    if (number := read_quantity(outcome)) is None:
        raise Problem(Kind.GARBLED, f"its answer to {call[0]} is no number")
    return number


def _timed(endpoint: Endpoint, deadline: float) -> float:
    began = time.monotonic()
    _number(endpoint, ("eth_blockNumber", ()), deadline)
    return time.monotonic() - began


def _has(endpoint: Endpoint, name: str, head: int, deadline: float) -> bool:
    calls: dict[str, Call] = {
        "eth_getTransactionReceipt": (name, (_NOTHING,)),
        "eth_getLogs": (name, ({"fromBlock": hex(head), "toBlock": hex(head), "topics": [_NOTHING]},)),
        "finalized": ("eth_getBlockByNumber", (name, False)),
        "safe": ("eth_getBlockByNumber", (name, False)),
    }
    try:
        [outcome] = _ask(endpoint, [calls.get(name, (name, (hex(head),)))], deadline)
    except Problem as problem:
        if problem.kind in (Kind.TRANSPORT, Kind.TIMEOUT):
            raise
        return False
    if name in ("finalized", "safe"):
        return isinstance(outcome, dict)
    return not isinstance(outcome, Problem)


def _batch(endpoint: Endpoint, most: int, deadline: float) -> int:
    """The largest of ``most``, a half of it, a quarter… that it answers."""
    size = most
    while size > 1:
        try:
            outcomes = _ask(endpoint, [("eth_blockNumber", ())] * size, deadline)
            if not any(isinstance(outcome, Problem) for outcome in outcomes):
                return size
        except Problem as problem:
            if problem.kind in (Kind.TRANSPORT, Kind.RATE_LIMITED):
                raise
        size //= 2
    return 1
