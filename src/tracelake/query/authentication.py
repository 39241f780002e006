"""Who asks: attempts by their capability token, people by their bearer token. Neither asks the Dispatcher.

A capability token is proven by the Dispatcher's published keys, kept and refreshed by ``JwksCache``, at the state
database's time; whether its attempt is still the current one is looked up together with the datasets. Bearer tokens
are looked up by hash in the catalog.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import httpx
from litestar.types import Scope

from tracelake.domain.errors import Unauthenticated, Unavailable
from tracelake.query.caller import Caller, TaskCaller, UserCaller
from tracelake.serving.identity import bearer_token, capability_token
from tracelake.tokens.jwks import MAX_JWKS_BYTES
from tracelake.tokens.jwks_cache import JwksCache
from tracelake.tokens.user_tokens import looks_like_token

JWKS_PATH = "/internal/jwks/task"
REFRESH_SECONDS = 60.0

Now = Callable[[], Awaitable[datetime]]


@dataclass(frozen=True, slots=True)
class Asker:
    caller: Caller


class CatalogClock:
    """The state database's time without asking it on every request: the difference between the two clocks is
    measured now and then, and kept while the database can't be asked."""

    def __init__(self, measure: Now, *, refresh: float = REFRESH_SECONDS) -> None:
        self._measure = measure
        self._refresh = refresh
        self._ahead: timedelta | None = None
        self._measured_at = 0.0

    async def now(self) -> datetime:
        if self._ahead is None or time.monotonic() - self._measured_at > self._refresh:
            try:
                there = await self._measure()
                self._ahead = there - datetime.now(UTC)
            except Unavailable:
                if self._ahead is None:
                    raise
            self._measured_at = time.monotonic()
        return datetime.now(UTC) + self._ahead


class TaskAuthenticator:
    def __init__(self, keys: JwksCache, now: Now, *, issuer: str, audience: str) -> None:
        self._keys = keys
        self._now = now
        self._issuer = issuer
        self._audience = audience

    async def __call__(self, scope: Scope) -> Asker:
        token = capability_token(scope)
        claims = await self._keys.verify(
            token, audience=self._audience, issuer=self._issuer, now=await self._now()
        )
        return Asker(TaskCaller.of(claims))


class UserAuthenticator:
    def __init__(self, find: Callable[[str], Awaitable[UserCaller | None]]) -> None:
        self._find = find

    async def __call__(self, scope: Scope) -> Asker:
        token = bearer_token(scope)
        user = await self._find(token) if looks_like_token(token) else None
        if user is None:
            raise Unauthenticated("UserTokenInvalid", "the user token is not valid")
        return Asker(user)


def key_fetcher(
    http: httpx.AsyncClient, internal_url: Callable[[], str]
) -> Callable[[str], Awaitable[bytes]]:
    """Fetches a path of the Dispatcher's internal port; where that is, is asked for each time."""

    async def fetch(path: str) -> bytes:
        async with http.stream("GET", internal_url().rstrip("/") + path) as answer:
            answer.raise_for_status()
            document = b""
            async for piece in answer.aiter_bytes():
                document += piece
                if len(document) > MAX_JWKS_BYTES:
                    raise Unavailable("JwksUnavailable", "the key document is too large")
            return document

    return fetch
