"""One call to an invoker, and what is certain afterwards.

An attempt is handed over at most once, so what matters is whether the invoker may have taken it. Connections
aren't reused: on one that the other side was about to close, a call that was never read would look like one
whose answer got lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import httpx
import msgspec

from tracelake.contracts.bundles import INVOKE_PATH, Invocation, function_of
from tracelake.domain.errors import TracelakeError

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 20.0
_DETAIL = 300
# Raised before the first byte is sent.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
_encode = msgspec.json.Encoder(uuid_format="canonical").encode


class Handed(StrEnum):
    """``ACCEPTED``: the invoker has it. ``FULL``: no slot right now. ``AWAY``: it was not taken, and the next one
    wouldn't be. ``REJECTED``: this one was not taken. ``UNKNOWN``: it may have been."""

    ACCEPTED = "accepted"
    FULL = "full"
    AWAY = "away"
    REJECTED = "rejected"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HandOver:
    outcome: Handed
    detail: str = ""


class InvokerClient:
    """``tokens`` are the valid worker tokens, the preferred one first: while they are being rotated, an invoker
    may know another one than we would show."""

    def __init__(
        self, tokens: Callable[[], Sequence[str]], *, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        self._tokens = tokens
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(answer_seconds, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def invoke(self, url: str, invocation: Invocation) -> HandOver:
        target = url + INVOKE_PATH.format(function=function_of(invocation))
        body = _encode(invocation)
        try:
            tokens = self._tokens()
        except (OSError, TracelakeError) as error:
            return HandOver(Handed.AWAY, f"no worker token can be read to show to {url}: {error}")
        for token in tokens:
            headers = {
                "X-Trace-Worker-Token": token,
                "X-Amz-Invocation-Type": "Event",
                "Content-Type": "application/json",
            }
            try:
                answer = await self._http.post(target, content=body, headers=headers)
            except _NOT_SENT as error:
                return HandOver(Handed.AWAY, f"the invoker at {url} can't be reached: {_said(error)}")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                return HandOver(Handed.UNKNOWN, f"the invoker at {url} didn't answer: {_said(error)}")
            if answer.status_code != httpx.codes.UNAUTHORIZED:
                return _read(url, answer)
        return HandOver(Handed.AWAY, f"the invoker at {url} takes none of this Dispatcher's worker tokens")


def _read(url: str, answer: httpx.Response) -> HandOver:
    said = f"the invoker at {url} answered {answer.status_code}: {answer.text[:_DETAIL]}"
    match answer.status_code:
        case 200 | 202:
            return HandOver(Handed.ACCEPTED)
        case 429:
            return HandOver(Handed.FULL, said)
        case 503:
            return HandOver(Handed.AWAY, said)
        case status if 400 <= status < 500:
            return HandOver(Handed.REJECTED, said)
        case _:
            return HandOver(Handed.UNKNOWN, said)


def _said(error: Exception) -> str:
    return str(error)[:_DETAIL] or type(error).__name__
