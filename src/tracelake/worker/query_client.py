"""The Query Service as operators reach it: through the wrapper, with the attempt's own token.

A query changes nothing, so it is repeated like every other call until it is answered or the attempt's time is over.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec

from tracelake.contracts.operator_protocol import MAX_FRAME
from tracelake.contracts.query_api import TASK_QUERY_PATH, QueryRequest
from tracelake.domain.errors import TooLarge, TracelakeError, Unavailable
from tracelake.secret import Secret
from tracelake.worker.dispatcher_client import CAPABILITY_HEADER, refusal
from tracelake.worker.http_link import HttpAnswer, NoAnswer, open_link

_PAUSES = (0.05, 2.0)
_TRY_SECONDS = 300.0
_ROOM = 1024
"""In a frame, for what stands around an answer."""


class QueryClient:
    def __init__(self, query_url: str) -> None:
        self.url = query_url.rstrip("/")
        self._link = open_link(self.url, {"Content-Type": "application/json"})

    async def close(self) -> None:
        await self._link.close()

    async def ask(self, query: QueryRequest, token: Secret, *, until: float | None = None) -> Any:
        """A ``QueryResponse`` in JSON's own types."""
        body = msgspec.json.encode(query)
        pause, longest = _PAUSES
        while True:
            found = await self._try(body, token)
            if isinstance(found, HttpAnswer):
                return _within_a_frame(found)
            if not isinstance(found, Unavailable) and found.status < 500:
                raise found
            wait = pause * random.uniform(0.5, 1.5)
            if until is not None and asyncio.get_running_loop().time() + wait > until:
                raise found
            await asyncio.sleep(wait)
            pause = min(longest, pause * 2)

    async def _try(self, body: bytes, token: Secret) -> HttpAnswer | TracelakeError:
        headers = {CAPABILITY_HEADER: token.reveal()}
        try:
            answer = await self._link.request(
                "POST", TASK_QUERY_PATH, body, seconds=_TRY_SECONDS, headers=headers
            )
        except NoAnswer as error:
            return Unavailable("QueryServiceUnreachable", f"{self.url}: {error}")
        return answer if 200 <= answer.status < 300 else refusal(answer)


def _within_a_frame(answer: HttpAnswer) -> Any:
    if len(answer.body) > MAX_FRAME - _ROOM:
        raise TooLarge(
            "ResultTooLarge",
            f"the result has {len(answer.body):,} bytes: ask for less, or read the input itself",
        )
    return msgspec.json.decode(answer.body)
