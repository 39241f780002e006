"""Errors of a pool, and the classification of problems with an answer.

Unavailable
├── RpcUnavailable      every endpoint failed, or the deadline passed; names each endpoint's last problem
├── BlockNotFound       the block is past the head of every endpoint
└── NoQuorum            fewer endpoints agree than the pool demands; names what each of them has
Invalid
└── RpcRefused          the question itself is refused: asking again won't help

``RpcProblem`` is one failed request or call. Its kind decides whether the same endpoint is asked again, with
less or later, or another one. Providers word the same problem in many ways and reuse codes for different
problems, so the message counts for more than the code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.raw_block import SHORT_TEXT, printable, shown

# An endpoint chooses the message, and a search takes longer the longer the text is.
_READ = 4000
"""Maximum number of characters of a message that the patterns below are run over."""
_NO_METHOD = re.compile(
    r"method.{0,80}(not found|not exist|not available|unavailable|not supported|unsupported|not whitelisted"
    r"|not allowed|disabled|not enabled|is not implemented)|(unsupported|unknown|invalid) method|no such method"
)
_RATE = re.compile(
    r"rate.?limit|too many requests|requests? (per|rate|limit|count)|compute units|throughput|quota|throttl"
    r"|(credit|capacity|usage).{0,40}(exceed|limit|exhaust)|exceeded.{0,40}(credit|capacity|usage)"
)
_BATCH = re.compile(r"\bbatch")
_SIZE = re.compile(
    r"range|limit|too many|too (large|big|wide|long)|more than|10,?000|response size|max(imum)?\b|exceed|results"
    r"|timeout|timed out|too much"
)
_RESPONSE = re.compile(r"response.{0,20}(too (large|big)|size|exceed)")
_MISSING = re.compile(
    r"(header|block|transaction|resource|receipts?).{0,30}(not found|not available|not yet|unknown|missing)"
    r"|(unknown|missing|no such) (header|block)|(beyond|after|greater than|past).{0,30}(head|latest|current)"
)
_RANGED = frozenset({"eth_getLogs"})


class RpcUnavailable(Unavailable):
    def __init__(self, what: str, problems: Mapping[str, str]) -> None:
        each = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        super().__init__("RpcUnavailable", f"no endpoint answered {what}: {each or 'none was asked'}")
        self.what, self.problems = what, dict(problems)

    def __reduce__(self) -> tuple[type[RpcUnavailable], tuple[str, dict[str, str]]]:
        return type(self), (self.what, self.problems)


class BlockNotFound(Unavailable):
    def __init__(self, number: int, reason: str) -> None:
        super().__init__("BlockNotFound", f"block {number} isn't there: {reason}")
        # Not ``reason``: that is the machine-readable word of every error.
        self.number, self.explanation = number, reason

    def __reduce__(self) -> tuple[type[BlockNotFound], tuple[int, str]]:
        return type(self), (self.number, self.explanation)


class NoQuorum(Unavailable):
    """``views`` is what each endpoint has to say, by its name."""

    def __init__(self, what: str, quorum: int, views: Mapping[str, str]) -> None:
        each = "; ".join(f"{name}: {view}" for name, view in views.items())
        super().__init__(
            "NoQuorum", f"{quorum} endpoints must agree on {what}, and they don't: {each or 'none answered'}"
        )
        self.what, self.quorum, self.views = what, quorum, dict(views)

    def __reduce__(self) -> tuple[type[NoQuorum], tuple[str, int, dict[str, str]]]:
        return type(self), (self.what, self.quorum, self.views)


class RpcRefused(Invalid):
    """``code`` is the JSON-RPC error code of the node."""

    def __init__(self, method: str, endpoint: str, code: int, message: str) -> None:
        super().__init__("RpcRefused", f"{method}: refused by {endpoint}: {message}")
        self.method, self.endpoint, self.code, self.node_message = method, endpoint, code, message

    def __reduce__(self) -> tuple[type[RpcRefused], tuple[str, str, int, str]]:
        return type(self), (self.method, self.endpoint, self.code, self.node_message)


class ProblemKind(Enum):
    TRANSPORT = "no connection, or a broken one"
    TIMEOUT = "no response in time"
    SERVER = "server error"
    GARBLED = "invalid response"
    RATE_LIMITED = "rate limited"
    LOCKED_OUT = "the key or the address is refused"
    BATCH = "too many calls in one batch"
    TOO_MUCH = "the range or the response is too large"
    NO_METHOD = "method not supported"
    REFUSED = "request refused"
    MISSING = "data not available"


class RpcProblem(Exception):
    """A failed request or call, inside of the pool only. ``retry_after`` is in seconds, if the endpoint gave it."""

    def __init__(
        self, kind: ProblemKind, text: str, *, retry_after: float | None = None, code: int = 0
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.retry_after = retry_after
        self.code = code


def kind_of_error(method: str, code: int, message: str) -> ProblemKind:
    """Classify a JSON-RPC error. ``method`` is empty for an error about a whole batch."""
    words = message.lower()
    # -32602 is about parameters, though its message may name a method.
    if code == -32601 or (code != -32602 and _NO_METHOD.search(words)):
        return ProblemKind.NO_METHOD
    # "Too many requests in batch" is about the size of a batch, not about the rate.
    about_batch = _BATCH.search(words) is not None and "rate" not in words
    if code == 429 or (_RATE.search(words) and not about_batch):
        return ProblemKind.RATE_LIMITED
    if method in _RANGED and _SIZE.search(words) and not about_batch:
        return ProblemKind.TOO_MUCH
    if about_batch or _RESPONSE.search(words):
        return ProblemKind.BATCH
    if _MISSING.search(words) or code == -32001:
        return ProblemKind.MISSING
    if code == -32004:
        return ProblemKind.NO_METHOD
    if code == -32005:
        return ProblemKind.TOO_MUCH if method in _RANGED else ProblemKind.RATE_LIMITED
    if code in (-32600, -32602, 3) or "revert" in words:
        return ProblemKind.REFUSED
    return ProblemKind.SERVER


def problem_of_error(method: str, error: Any) -> RpcProblem:
    """Read the ``error`` member of an answer, which may be anything."""
    if not isinstance(error, dict):
        return RpcProblem(ProblemKind.SERVER, f"error: {_text(error)}")
    code = error.get("code")
    # An endpoint may send anything in place of a number.
    code = code if isinstance(code, int) else 0
    message = _text(error.get("message", ""))
    data = error.get("data")
    retry_after = _retry_after(data)
    # Data that begins with 0x is what a contract returned, not words for people.
    if isinstance(data, str) and len(data) < SHORT_TEXT and not data.startswith("0x"):
        message = f"{message}: {data}" if message else data
    kind = kind_of_error(method, code, message)
    return RpcProblem(kind, f"error {code}: {printable(message)}", retry_after=retry_after, code=code)


def _text(value: Any) -> str:
    """A message as text. Most are a sentence, but JSON of any size is possible."""
    return value[:_READ] if isinstance(value, str) else shown(value)


def _retry_after(data: Any) -> float | None:
    """Seconds to wait, which some providers give in the error itself."""
    if not isinstance(data, dict):
        return None
    rate = data.get("rate")
    seconds = rate.get("backoff_seconds") if isinstance(rate, dict) else data.get("retry_after")
    return float(seconds) if isinstance(seconds, int | float) and seconds >= 0 else None
