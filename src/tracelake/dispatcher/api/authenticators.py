"""Authenticators of the Dispatcher: workers by a shared token, attempts by a signed one, users by a hashed one.

Capability tokens are verified at the state database's time (``serving.database_clock``), by which they were issued.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from uuid import UUID

from tracelake.contracts.headers import WORKER_HEADER
from tracelake.contracts.token_claims import TokenClaims
from tracelake.domain.errors import BadRequest, Forbidden, Unauthenticated
from tracelake.serving.identity import bearer_token, capability_token, header
from tracelake.serving.response import AsgiScope
from tracelake.store import users
from tracelake.store.db import Database, DeployLock, Transaction
from tracelake.store.users import User
from tracelake.tokens import capability
from tracelake.tokens.jose import PublicKeys
from tracelake.tokens.opaque_tokens import WorkerTokens, hash_user_token, looks_like_user_token

DispatcherCaller = User | TokenClaims | None
"""A user, an attempt (the claims of its token), or a worker, which has no name."""
_WORKER_TOKEN = WORKER_HEADER.lower().encode()


class WorkerAuthenticator:
    def __init__(self, tokens: WorkerTokens) -> None:
        self._tokens = tokens

    async def __call__(self, scope: AsgiScope) -> DispatcherCaller:
        self._tokens.check(header(scope, _WORKER_TOKEN))
        return None


class TaskAuthenticator:
    """``keys`` returns the published keys of a time; ``now`` is a clock that follows the state database."""

    def __init__(
        self,
        keys: Callable[[datetime], PublicKeys],
        now: Callable[[], Awaitable[datetime]],
        *,
        issuer: str,
        audience: str,
    ) -> None:
        self._keys = keys
        self._now = now
        self._issuer = issuer
        self._audience = audience

    async def __call__(self, scope: AsgiScope) -> DispatcherCaller:
        token = capability_token(scope)
        now = await self._now()
        return capability.verify(
            token, self._keys(now), audience=self._audience, issuer=self._issuer, now=now
        )


class UserAuthenticator:
    """Looks tokens up by hash and caches valid ones briefly, so that a revocation takes effect within seconds."""

    def __init__(self, db: Database, *, ttl: float = 3.0, most: int = 1024) -> None:
        self._db = db
        self._ttl = ttl
        self._most = most
        self._known: dict[bytes, tuple[User, float]] = {}

    async def __call__(self, scope: AsgiScope) -> DispatcherCaller:
        token = bearer_token(scope)
        user = await self._find(token) if looks_like_user_token(token) else None
        if user is None:
            raise Unauthenticated("UserTokenInvalid", "the user token is not valid")
        return user

    async def _find(self, token: str) -> User | None:
        token_hash = hash_user_token(token)
        found = self._known.get(token_hash)
        if found is not None and found[1] > time.monotonic():
            return found[0]

        async def work(tx: Transaction) -> User | None:
            return await users.find_token(tx, token_hash)

        # Before the query: a revocation that commits during it is noticed within one lifetime of the cache.
        asked_at = time.monotonic()
        user = await self._db.run(work, lock=DeployLock.NONE)
        if user is None:
            self._known.pop(token_hash, None)
            return None
        # Only valid tokens are cached, so guesses can't fill it; to clear it costs each one a lookup.
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[token_hash] = (user, asked_at + self._ttl)
        return user


def check_own_attempt(
    claims: TokenClaims, task_id: UUID, attempt: int | None, lease_token: UUID | None
) -> None:
    """Task-scoped calls name their fence in full; task and attempt must be those of the token."""
    if attempt is None or lease_token is None:
        raise BadRequest("FenceMissing", "a task-scoped call needs 'attempt' and 'lease_token'")
    if (task_id, attempt) != (claims.task_id, claims.attempt):
        raise Forbidden("NotYourTask", "the capability token belongs to another task or attempt")
