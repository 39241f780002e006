"""What can be wrong with an answer, and which of it is whose fault.

The kind decides what happens next: whether the same endpoint is asked again, with less or later, or another one.
Providers word the same thing in many ways, and reuse codes for different things, so that the words count for more
than the code.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from tracelake.evm.foreign_text import SHORT, printable, shown

_READ = 4000
"""Of a message; the patterns below are run over it."""


class Kind(Enum):
    TRANSPORT = "no connection, or one that broke"
    TIMEOUT = "no answer in time"
    SERVER = "the endpoint says that it is out of order"
    GARBLED = "an answer that makes no sense"
    RATE_LIMITED = "asked too often"
    LOCKED_OUT = "the key or the address is refused"
    BATCH = "too many calls at once"
    TOO_MUCH = "a range or an answer that is too large"
    NO_METHOD = "a method that the endpoint doesn't have"
    REFUSED = "a question that the endpoint won't answer"
    MISSING = "something that the endpoint doesn't have, or not yet"


class Problem(Exception):
    """Inside of the pool only; ``retry_after`` in seconds where the endpoint said it."""

    def __init__(self, kind: Kind, text: str, *, retry_after: float | None = None, code: int = 0) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.retry_after = retry_after
        self.code = code


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


def kind_of_error(method: str, code: int, message: str) -> Kind:
    """What a JSON-RPC error means. ``method`` is empty for an error about a whole batch."""
    words = message.lower()
    if code == -32601 or (code != -32602 and _NO_METHOD.search(words)):
        return Kind.NO_METHOD
    # "Too many requests in batch" isn't about how often.
    about_batch = _BATCH.search(words) is not None and "rate" not in words
    if code == 429 or (_RATE.search(words) and not about_batch):
        return Kind.RATE_LIMITED
    if method in _RANGED and _SIZE.search(words) and not about_batch:
        return Kind.TOO_MUCH
    if about_batch or _RESPONSE.search(words):
        return Kind.BATCH
    if _MISSING.search(words) or code == -32001:
        return Kind.MISSING
    if code == -32004:
        return Kind.NO_METHOD
    if code == -32005:
        return Kind.TOO_MUCH if method in _RANGED else Kind.RATE_LIMITED
    if code in (-32600, -32602, 3) or "revert" in words:
        return Kind.REFUSED
    return Kind.SERVER


def problem_of_error(method: str, error: Any) -> Problem:
    """``error`` as it stands in the answer, whatever it is."""
    if not isinstance(error, dict):
        return Problem(Kind.SERVER, f"error: {_text(error)}")
    code = error.get("code")
    code = code if isinstance(code, int) else 0
    message = _text(error.get("message", ""))
    data = error.get("data")
    retry_after = _retry_after(data)
    if isinstance(data, str) and len(data) < SHORT and not data.startswith("0x"):
        message = f"{message}: {data}" if message else data
    kind = kind_of_error(method, code, message)
    return Problem(kind, f"error {code}: {printable(message)}", retry_after=retry_after, code=code)


def _text(value: Any) -> str:
    """Most say a sentence; it may as well be a tree of any size."""
    return value[:_READ] if isinstance(value, str) else shown(value)


def _retry_after(data: Any) -> float | None:
    """Some say in the error itself how long to wait."""
    if not isinstance(data, dict):
        return None
    rate = data.get("rate")
    seconds = rate.get("backoff_seconds") if isinstance(rate, dict) else data.get("retry_after")
    return float(seconds) if isinstance(seconds, int | float) and seconds >= 0 else None
