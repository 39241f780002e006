"""Authentication of callers: a task's attempt by its capability token, or a user by a bearer token.

Neither needs a call to the Dispatcher. A capability token is verified with the Dispatcher's published keys, which
``JwksCache`` keeps and refreshes, at the state database's time; whether its attempt is still the current one is
looked up together with the datasets. Bearer tokens are looked up by hash in the catalog.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

import httpx

from tracelake.contracts.token_claims import TokenClaims, TokenDataset
from tracelake.domain.errors import Unauthenticated, Unavailable
from tracelake.serving.identity import bearer_token, capability_token
from tracelake.serving.response import AsgiScope
from tracelake.tokens.capability import JwksCache
from tracelake.tokens.jose import MAX_JWKS_BYTES
from tracelake.tokens.opaque_tokens import looks_like_user_token

Now = Callable[[], Awaitable[datetime]]


@dataclass(frozen=True, slots=True)
class UserCaller:
    """Sees published datasets, in their current versions."""

    user_id: UUID
    org_id: UUID
    name: str


@dataclass(frozen=True, slots=True)
class TaskCaller:
    """Sees exactly the datasets of its token, in the token's versions."""

    task_id: UUID
    attempt: int
    org_id: UUID
    datasets: tuple[TokenDataset, ...]

    @classmethod
    def of(cls, claims: TokenClaims) -> TaskCaller:
        return cls(claims.task_id, claims.attempt, claims.org_id, claims.datasets)


QueryCaller: TypeAlias = UserCaller | TaskCaller


@dataclass(frozen=True, slots=True)
class AuthenticatedCaller:
    caller: QueryCaller


class QueryTaskAuthenticator:
    def __init__(self, keys: JwksCache, now: Now, *, issuer: str, audience: str) -> None:
        self._keys = keys
        self._now = now
        self._issuer = issuer
        self._audience = audience

    async def __call__(self, scope: AsgiScope) -> AuthenticatedCaller:
        token = capability_token(scope)
        claims = await self._keys.verify(
            token, audience=self._audience, issuer=self._issuer, now=await self._now()
        )
        return AuthenticatedCaller(TaskCaller.of(claims))


class QueryUserAuthenticator:
    def __init__(self, find: Callable[[str], Awaitable[UserCaller | None]]) -> None:
        self._find = find

    async def __call__(self, scope: AsgiScope) -> AuthenticatedCaller:
        token = bearer_token(scope)
        user = await self._find(token) if looks_like_user_token(token) else None
        if user is None:
            raise Unauthenticated("UserTokenInvalid", "the user token is not valid")
        return AuthenticatedCaller(user)


def key_fetcher(
    http: httpx.AsyncClient, internal_url: Callable[[], str]
) -> Callable[[str], Awaitable[bytes]]:
    """Fetches a path of the Dispatcher's internal port; ``internal_url`` is called each time, as it may change."""

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
