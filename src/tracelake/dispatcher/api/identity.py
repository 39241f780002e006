"""Who is calling: every route declares one kind of credential, and it is checked before anything is read.

A surface is built with an authenticator for each kind that its routes declare; a route whose kind has none
can't be built. The guard runs before the body or the query is looked at, so that a stranger learns nothing
from how a request is refused.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID

from litestar.connection import ASGIConnection
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import BaseRouteHandler
from litestar.types import Scope

from tracelake.contracts.token_claims import TokenClaims
from tracelake.domain.errors import BadRequest, Forbidden, Unauthenticated
from tracelake.store import users
from tracelake.store.db import Database, DeployLock, Transaction
from tracelake.store.users import User
from tracelake.tokens import capability
from tracelake.tokens.jwks import PublicKeys
from tracelake.tokens.user_tokens import hash_token, looks_like_token
from tracelake.tokens.worker_tokens import WorkerTokens

IDENTITY = "identity"
"""The key under which a route's options declare its kind."""


class Identity(StrEnum):
    NOBODY = "nobody"
    WORKER = "worker"
    TASK = "task"
    USER = "user"


WORKER_HEADER = "X-Trace-Worker-Token"
TASK_HEADER = "X-Trace-Task-Capability"
CHALLENGES = {
    Identity.WORKER: 'TraceWorkerToken realm="tracelake"',
    Identity.TASK: 'TraceTaskCapability realm="tracelake"',
    Identity.USER: 'Bearer realm="tracelake"',
}

Caller = User | TokenClaims | None
"""Who was found: a user, an attempt by its token, or a worker, who has no name."""


class Authenticator(Protocol):
    async def __call__(self, scope: Scope) -> Caller: ...


class WorkerAuthenticator:
    def __init__(self, tokens: WorkerTokens) -> None:
        self._tokens = tokens

    async def __call__(self, scope: Scope) -> Caller:
        self._tokens.check(_header(scope, b"x-trace-worker-token"))
        return None


class TaskAuthenticator:
    """``keys`` are the published ones at a time; ``now`` is a clock that follows the state database."""

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

    async def __call__(self, scope: Scope) -> Caller:
        token = _header(scope, b"x-trace-task-capability")
        if not token:
            raise Unauthenticated("CapabilityMissing", f"{TASK_HEADER} is missing")
        now = await self._now()
        return capability.verify(
            token, self._keys(now), audience=self._audience, issuer=self._issuer, now=now
        )


class UserAuthenticator:
    """Looks tokens up by hash and remembers good ones for a moment, so that revoking works within seconds."""

    def __init__(self, db: Database, *, ttl: float = 3.0, most: int = 1024) -> None:
        self._db = db
        self._ttl = ttl
        self._most = most
        self._known: dict[bytes, tuple[User, float]] = {}

    async def __call__(self, scope: Scope) -> Caller:
        scheme, _, token = (_header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("UserTokenMissing", "'Authorization: Bearer' is missing")
        user = await self._find(token.strip()) if looks_like_token(token.strip()) else None
        if user is None:
            raise Unauthenticated("UserTokenInvalid", "the user token is not valid")
        return user

    async def _find(self, token: str) -> User | None:
        token_hash = hash_token(token)
        found = self._known.get(token_hash)
        if found is not None and found[1] > time.monotonic():
            return found[0]

        async def work(tx: Transaction) -> User | None:
            return await users.find_token(tx, token_hash)

        asked_at = time.monotonic()
        user = await self._db.run(work, lock=DeployLock.NONE)
        if user is None:
            self._known.pop(token_hash, None)
            return None
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[token_hash] = (user, asked_at + self._ttl)
        return user


@dataclass(frozen=True, slots=True)
class Authentication:
    """The authenticators of one surface."""

    authenticators: Mapping[Identity, Authenticator]

    async def check(self, scope: Scope, identity: Identity) -> None:
        """Leaves who is calling in the scope's state."""
        if identity is not Identity.NOBODY:
            scope["state"]["caller"] = await self.authenticators[identity](scope)

    async def guard(self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        if connection.scope.get("method") == "OPTIONS":
            raise _no_options(connection)
        await self.check(connection.scope, handler.opt[IDENTITY])


def _no_options(connection: ASGIConnection[Any, Any, Any, Any]) -> MethodNotAllowedException:
    """The framework answers OPTIONS by itself, without a credential and with half of the methods."""
    template: str = connection.scope["path_template"]
    methods = connection.app.route_handler_method_map[template]
    return MethodNotAllowedException(headers={"allow": ", ".join(methods)})


def check_own_attempt(
    claims: TokenClaims, task_id: UUID, attempt: int | None, lease_token: UUID | None
) -> None:
    """Task-scoped calls name their fence in full, and it must be the token's."""
    if attempt is None or lease_token is None:
        raise BadRequest("FenceMissing", "a task-scoped call needs 'attempt' and 'lease_token'")
    if (task_id, attempt) != (claims.task_id, claims.attempt):
        raise Forbidden("NotYourTask", "the capability token belongs to another task or attempt")


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return None
