"""How an endpoint has done, for people and metrics to read."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tracelake.evm.rpc.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """``state``: ``ok``, ``suspect`` after failures, ``resting`` because it asked for it, ``left out`` for good
    reason, ``unknown`` before its first answer. ``latency`` in seconds."""

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
