"""``probe_pool``: a report about each endpoint of a pool, for people who set one up.

Endpoints are asked side by side and each on its own, without the pool's retries: here a failure is the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tracelake.evm.profiles.registry import profile_of
from tracelake.evm.raw_block import printable
from tracelake.evm.rpc.blocks import most_agreed
from tracelake.evm.rpc.config import EndpointConfig, PoolConfig
from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.errors import ProblemKind, RpcProblem
from tracelake.evm.rpc.exchange import RpcCall, read_quantity

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
"""Methods, and the two block tags that not every chain has."""


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """``latency`` is the best of a few, in seconds. ``lag`` is the number of blocks behind the furthest
    endpoint of the pool. ``problem`` is the reason why it can't be used, or something odd about it."""

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
    agrees: bool | None = None
    """Whether it has the block that most endpoints have at a height that enough of them have reached; None if it
    wasn't asked."""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PoolReport:
    pool: str
    chain_id: int | None
    profile: str
    endpoints: list[EndpointReport] = field(default_factory=list)
    quorum: int = 1
    compared_at: int | None = None
    """The block that the endpoints were compared at."""

    @property
    def works(self) -> bool:
        """Whether enough endpoints can be used, and agree."""
        usable = [endpoint for endpoint in self.endpoints if endpoint.usable]
        if self.quorum == 1:
            return bool(usable)
        return sum(endpoint.agrees is True for endpoint in usable) >= self.quorum


def probe_pool(config: PoolConfig) -> PoolReport:
    with ThreadPoolExecutor(len(config.endpoints)) as threads:
        reports = list(threads.map(partial(_probe, config.deadline_seconds), config.endpoints))
        report = _on_one_chain(config, reports)
        usable = sorted(each.head for each in report.endpoints if each.usable and each.head is not None)
        if len(usable) < max(2, config.quorum):
            return report
        # Without a quorum, the block that all of them should have.
        height = usable[-config.quorum] if config.quorum > 1 else usable[0]
        asked = list(threads.map(partial(_hash_at, config.deadline_seconds, height), config.endpoints))
    hashes = {each.name: own for each, own in zip(config.endpoints, asked, strict=True) if own is not None}
    return _with_agreement(report, hashes, height)


def _with_agreement(report: PoolReport, hashes: dict[str, str], height: int) -> PoolReport:
    usable = {each.name for each in report.endpoints if each.usable}
    own = {name: each for name, each in hashes.items() if name in usable}
    # Of two that disagree neither is right; more than half, or the quorum, decides.
    agreed = most_agreed(own, max(report.quorum, len(own) // 2 + 1))
    endpoints = []
    for each in report.endpoints:
        found = own.get(each.name)
        if found is None:
            endpoints.append(each)
        elif found == agreed:
            endpoints.append(replace(each, agrees=True))
        else:
            problem = f"it has another block {height}: {printable(found)}"
            endpoints.append(replace(each, agrees=False, problem=problem))
    return replace(report, endpoints=endpoints, compared_at=height)


def _hash_at(patience: float, number: int, config: EndpointConfig) -> str | None:
    endpoint = Endpoint(config, 1.0)
    try:
        [outcome] = _ask(
            endpoint, [("eth_getBlockByNumber", (hex(number), False))], time.monotonic() + patience
        )
    except RpcProblem:
        return None
    finally:
        endpoint.close()
    own = outcome.get("hash") if isinstance(outcome, dict) else None
    return own if isinstance(own, str) else None


def _on_one_chain(config: PoolConfig, reports: Sequence[EndpointReport]) -> PoolReport:
    reported = [report.chain_id for report in reports if report.chain_id is not None]
    # Without a configured chain the majority decides, as in the pool itself.
    chain_id = config.chain_id or max(reported, key=reported.count, default=None)
    on_it = [report for report in reports if report.chain_id == chain_id]
    newest = max((report.head for report in on_it if report.head is not None), default=None)
    compared = [_compared(report, chain_id, newest) for report in reports]
    profile = profile_of(config.chain, chain_id).name
    return PoolReport(config.name, chain_id, profile, compared, config.quorum)


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
    except RpcProblem as problem:
        reachable = problem.kind not in (ProblemKind.TRANSPORT, ProblemKind.TIMEOUT)
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


def _ask(endpoint: Endpoint, calls: Sequence[RpcCall], deadline: float) -> list[Any]:
    wait = endpoint.bucket.take(len(calls), time.monotonic())
    time.sleep(min(wait, max(0.0, deadline - time.monotonic())))
    return endpoint.exchange(calls, deadline, kind="probe")[0]


def _number(endpoint: Endpoint, call: RpcCall, deadline: float) -> int:
    [outcome] = _ask(endpoint, [call], deadline)
    if isinstance(outcome, RpcProblem):
        raise outcome
    if (number := read_quantity(outcome)) is None:
        raise RpcProblem(ProblemKind.GARBLED, f"invalid {call[0]}")
    return number


def _timed(endpoint: Endpoint, deadline: float) -> float:
    began = time.monotonic()
    _number(endpoint, ("eth_blockNumber", ()), deadline)
    return time.monotonic() - began


def _has(endpoint: Endpoint, name: str, head: int, deadline: float) -> bool:
    calls: dict[str, RpcCall] = {
        "eth_getTransactionReceipt": (name, (_NOTHING,)),
        "eth_getLogs": (name, ({"fromBlock": hex(head), "toBlock": hex(head), "topics": [_NOTHING]},)),
        "finalized": ("eth_getBlockByNumber", (name, False)),
        "safe": ("eth_getBlockByNumber", (name, False)),
    }
    try:
        [outcome] = _ask(endpoint, [calls.get(name, (name, (hex(head),)))], deadline)
    except RpcProblem as problem:
        if problem.kind in (ProblemKind.TRANSPORT, ProblemKind.TIMEOUT):
            raise
        return False
    if name in ("finalized", "safe"):
        return isinstance(outcome, dict)
    return not isinstance(outcome, RpcProblem)


def _batch(endpoint: Endpoint, most: int, deadline: float) -> int:
    """The largest batch that the endpoint answers, of ``most``, a half of it, a quarter…"""
    size = most
    while size > 1:
        try:
            outcomes = _ask(endpoint, [("eth_blockNumber", ())] * size, deadline)
            if not any(isinstance(outcome, RpcProblem) for outcome in outcomes):
                return size
        except RpcProblem as problem:
            if problem.kind in (ProblemKind.TRANSPORT, ProblemKind.RATE_LIMITED):
                raise
        size //= 2
    return 1
