"""``read_logs``: eth_getLogs over a range of any length.

Providers have different limits and report them differently, so a range that an endpoint finds too large is
halved until it is accepted, and the next range starts from the length that worked. The endpoint's own head is
requested in the same batch: many answer ``[]`` for blocks that they don't have yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracelake.domain.errors import Invalid
from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.endpoint_selector import PoolRequest
from tracelake.evm.rpc.errors import BlockNotFound, ProblemKind, RpcProblem
from tracelake.evm.rpc.exchange import RpcCall, read_quantity

if TYPE_CHECKING:
    from tracelake.evm.rpc.pool import Pool

LOGS = "eth_getLogs"
HEAD = "eth_blockNumber"
_GROWTH = 2


def read_logs(
    pool: Pool,
    start: int,
    end: int,
    *,
    address: str | Sequence[str] | None,
    topics: Sequence[Any] | None,
) -> list[dict[str, Any]]:
    if start < 0 or end < start:
        raise Invalid("InvalidRange", f"no range of blocks: {start} to {end}")
    wanted: dict[str, Any] = {}
    if address is not None:
        wanted["address"] = address if isinstance(address, str) else list(address)
    if topics is not None:
        wanted["topics"] = list(topics)
    logs: list[dict[str, Any]] = []
    span = end - start + 1
    while start <= end:
        upto = min(end, start + span - 1)
        found, upto = _read_from(pool, start, upto, wanted)
        logs += found
        # Limits depend on the logs in a range, which vary along the chain, so longer ranges are tried again.
        span = (upto - start + 1) * _GROWTH
        start = upto + 1
    return logs


def _read_from(pool: Pool, start: int, end: int, wanted: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The logs of a range that begins at ``start``, and where it ends: at ``end``, or earlier."""
    question = pool.question(f"logs of blocks {start} to {end}", needs=[LOGS], block=end)
    while True:
        with pool.selector.ask(question, 2) as endpoint:
            outcome = _ask(pool, endpoint, question, start, end, wanted)
        if isinstance(outcome, list):
            return outcome, end
        if outcome.kind in (ProblemKind.TOO_MUCH, ProblemKind.TIMEOUT, ProblemKind.REFUSED) and start < end:
            # Some endpoints report a range that is too long as a refusal.
            end = start + (end - start) // 2
            question = pool.question(f"logs of blocks {start} to {end}", needs=[LOGS], block=end)
            continue
        question.failed(endpoint, outcome)


def _ask(
    pool: Pool, endpoint: Endpoint, question: PoolRequest, start: int, end: int, wanted: dict[str, Any]
) -> list[dict[str, Any]] | RpcProblem:
    calls: list[RpcCall] = [
        (HEAD, ()),
        (LOGS, ({"fromBlock": hex(start), "toBlock": hex(end), **wanted},)),
    ]
    # Without batches the head is asked for first: blocks that it covers are there when the logs are read.
    together = endpoint.batch_size("mixed") > 1
    try:
        outcomes = []
        for some in [calls] if together else [[call] for call in calls]:
            outcomes += pool.selector.exchange(endpoint, some, question, "mixed" if together else LOGS)[0]
    except RpcProblem as problem:
        return problem
    head, logs = outcomes
    if (behind := _behind(pool, endpoint, head, end)) is not None:
        return behind
    return _checked(logs, start, end)


def _behind(pool: Pool, endpoint: Endpoint, answer: Any, end: int) -> RpcProblem | None:
    if isinstance(answer, RpcProblem):
        return answer
    if (head := read_quantity(answer)) is None:
        return RpcProblem(ProblemKind.GARBLED, f"invalid {HEAD}")
    endpoint.health.head = head
    if head >= end:
        return None
    # Patient: a slow endpoint may be the only one that has the block.
    newest = pool.head(patient=True)
    if newest.number < end:
        raise BlockNotFound(end, f"the newest block is {newest.number}, as {newest.endpoint} says")
    return RpcProblem(ProblemKind.MISSING, f"it has no block {end} yet, only {head}")


def _checked(logs: Any, start: int, end: int) -> list[dict[str, Any]] | RpcProblem:
    if isinstance(logs, RpcProblem):
        return logs
    if not isinstance(logs, list):
        return RpcProblem(ProblemKind.GARBLED, "null for logs" if logs is None else "logs is not a list")
    places: list[tuple[int, int]] = []
    for log in logs:
        number, index = (
            read_quantity(log.get(name) if isinstance(log, dict) else None)
            for name in ("blockNumber", "logIndex")
        )
        if number is None or index is None:
            return RpcProblem(ProblemKind.GARBLED, "logs without a block number or an index")
        places.append((number, index))
    if any(not start <= number <= end for number, _ in places):
        return RpcProblem(ProblemKind.GARBLED, f"logs of other blocks than {start} to {end}")
    if len(set(places)) != len(places):
        return RpcProblem(ProblemKind.GARBLED, "the same log twice")
    return [log for _, log in sorted(zip(places, logs, strict=True), key=lambda pair: pair[0])]
