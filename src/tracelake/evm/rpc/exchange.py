"""JSON-RPC on the wire: calls into one request, and an answer back into one outcome per call.

Answers of a batch come in any order, some may be missing, doubled or errors of their own. Whatever arrives, each
call ends with a result or with a ``Problem``; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from tracelake.evm.rpc.http_answer import HttpAnswer
from tracelake.evm.rpc.problem import Kind, Problem, problem_of_error

Call = tuple[str, Sequence[Any]]
Outcome = Any
"""The result as it came, or a ``Problem``."""

_LONGEST_WAIT = 60.0


def encode(calls: Sequence[Call], first_id: int) -> bytes:
    """A single call goes without a batch around it: some endpoints take no batches."""
    requests = [
        {"jsonrpc": "2.0", "id": first_id + index, "method": method, "params": params}
        for index, (method, params) in enumerate(calls)
    ]
    return orjson.dumps(requests[0] if len(requests) == 1 else requests)


def decode(answer: HttpAnswer, calls: Sequence[Call], first_id: int) -> list[Outcome]:
    """Raises ``Problem`` for an answer that holds for none of the calls."""
    tree = _parse(answer)
    if answer.status != 200:
        raise _refusal(answer, tree, calls)
    if len(calls) == 1 and isinstance(tree, dict):
        return [_single(tree, calls[0], first_id)]
    if isinstance(tree, dict):
        if tree.get("error") is not None:
            raise _about_batch(tree["error"], calls)
        raise Problem(Kind.GARBLED, "one answer to a batch of calls")
    if not isinstance(tree, list):
        raise Problem(Kind.GARBLED, "an answer that isn't JSON-RPC")
    return _match(tree, calls, first_id)


def _parse(answer: HttpAnswer) -> Any:
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        if answer.status == 200:
            what = (
                "HTML" if bytes(answer.body[:64]).lstrip()[:1] == b"<" else "not JSON, or only a part of it"
            )
            raise Problem(Kind.GARBLED, f"the answer is {what}") from None
        return None


def _refusal(answer: HttpAnswer, tree: Any, calls: Sequence[Call]) -> Problem:
    """Some put a JSON-RPC error under an HTTP status; what it says is more exact."""
    status = answer.status
    if status == 429:
        wait = _retry_after(answer.headers.get("retry-after"))
        return Problem(Kind.RATE_LIMITED, "HTTP 429: asked too often", retry_after=wait)
    if isinstance(tree, dict) and isinstance(tree.get("error"), dict):
        about = _about_batch(tree["error"], calls)
        if about.kind is not Kind.SERVER:
            return about
    if status == 413:
        return Problem(Kind.BATCH if len(calls) > 1 else Kind.TOO_MUCH, "HTTP 413: too large")
    if status in (401, 402, 403, 404, 405, 407):
        return Problem(Kind.LOCKED_OUT, f"HTTP {status}: the key or the address is refused")
    if 300 <= status < 400:
        return Problem(Kind.LOCKED_OUT, f"HTTP {status}: it has moved to another address")
    if status in (408, 504, 524):
        return Problem(Kind.TIMEOUT, f"HTTP {status}: no answer in time")
    wait = _retry_after(answer.headers.get("retry-after")) if status == 503 else None
    return Problem(Kind.SERVER, f"HTTP {status}", retry_after=wait)


def _about_batch(error: Any, calls: Sequence[Call]) -> Problem:
    methods = {method for method, _ in calls}
    problem = problem_of_error(methods.pop() if len(methods) == 1 else "", error)
    if len(calls) > 1 and problem.kind in (Kind.REFUSED, Kind.TOO_MUCH, Kind.NO_METHOD):
        # One error for all of them can only be about there being so many, or none can be answered singly either.
        return Problem(Kind.BATCH, problem.text, code=problem.code)
    return problem


def _single(item: dict[str, Any], call: Call, expected: int) -> Outcome:
    if item.get("error") is not None:
        return problem_of_error(call[0], item["error"])
    if item.get("id") != expected:
        raise Problem(Kind.GARBLED, "the answer to another question")
    return _result(item)


def _match(items: list[Any], calls: Sequence[Call], first_id: int) -> list[Outcome]:
    missing = Problem(Kind.GARBLED, "no answer to this call among those of its batch")
    outcomes: list[Outcome] = [missing] * len(calls)
    for item in items:
        if type(item) is not dict or type(number := item.get("id")) is not int:
            continue
        index = number - first_id
        if not 0 <= index < len(calls):
            continue
        if (error := item.get("error")) is not None:
            outcome: Outcome = problem_of_error(calls[index][0], error)
        else:
            outcome = _result(item)
        if outcomes[index] is not missing and outcomes[index] != outcome:
            outcome = Problem(Kind.GARBLED, "two different answers to one call")
        outcomes[index] = outcome
    if len(calls) > 1 and all(outcome is missing for outcome in outcomes):
        # A batch that is refused by a list of one error with no id.
        for item in items:
            if isinstance(item, dict) and item.get("error") is not None:
                raise _about_batch(item["error"], calls)
    return outcomes


def _result(item: dict[str, Any]) -> Outcome:
    try:
        return item["result"]
    except KeyError:
        return Problem(Kind.GARBLED, "an answer without a result")


def _retry_after(text: str | None) -> float | None:
    """Seconds; a date is left to our own judgement, for clocks differ."""
    if text is None or not text.strip().isdigit():
        return None
    return min(float(text), _LONGEST_WAIT)
