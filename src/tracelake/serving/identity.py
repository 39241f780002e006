"""Who is calling: every route declares one kind of credential, and it is checked before anything is read.

A surface is built with an authenticator for each kind that its routes declare; a route whose kind has none
can't be built. The guard runs before the body or the query is looked at, so that a stranger learns nothing
from how a request is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from litestar.connection import ASGIConnection
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import BaseRouteHandler
from litestar.types import Scope

from tracelake.domain.errors import Unauthenticated

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


class Authenticator(Protocol):
    async def __call__(self, scope: Scope) -> Any:
        """Who was found; ``Unauthenticated`` otherwise."""


@dataclass(frozen=True, slots=True)
class Authentication:
    """The authenticators of one surface."""

    authenticators: Mapping[Identity, Authenticator]

    async def check(self, scope: Scope, identity: Identity) -> None:
        """Leaves who is calling in the scope's state."""
        if identity is not Identity.NOBODY:
            scope["state"]["caller"] = await self.authenticators[identity](scope)
            # Tasks are many, and their code is anybody's: their connections make room for those of workers.
            scope["state"]["stays"] = identity is not Identity.TASK

    async def guard(self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        if connection.scope.get("method") == "OPTIONS":
            raise _no_options(connection)
        await self.check(connection.scope, handler.opt[IDENTITY])


def _no_options(connection: ASGIConnection[Any, Any, Any, Any]) -> MethodNotAllowedException:
    """The framework answers OPTIONS by itself, without a credential and with half of the methods."""
    template: str = connection.scope["path_template"]
    methods = connection.app.route_handler_method_map[template]
    return MethodNotAllowedException(headers={"allow": ", ".join(methods)})


def capability_token(scope: Scope) -> str:
    token = header(scope, b"x-trace-task-capability")
    if not token:
        raise Unauthenticated("CapabilityMissing", f"{TASK_HEADER} is missing")
    return token


def bearer_token(scope: Scope) -> str:
    scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("UserTokenMissing", "'Authorization: Bearer' is missing")
    return token.strip()


def header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return None
