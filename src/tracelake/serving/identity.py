"""Authentication: every route declares one kind of credential, which is checked before its request is read.

A surface is built with an authenticator for each kind that its routes declare; a route whose kind has none can't be
built. Because the credential is checked before the body and the query, a caller without one learns nothing from how
a request is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from tracelake.contracts.headers import AUTHORIZATION_HEADER, CAPABILITY_HEADER
from tracelake.domain.errors import Unauthenticated
from tracelake.serving.response import AsgiScope

# ASGI servers give header names in lower case.
_AUTHORIZATION = AUTHORIZATION_HEADER.lower().encode()
_CAPABILITY = CAPABILITY_HEADER.lower().encode()


class Identity(StrEnum):
    """The kind of credential that a route asks for."""

    NONE = "nobody"
    WORKER = "worker"
    TASK = "task"
    USER = "user"


CHALLENGES = {
    Identity.WORKER: 'TraceWorkerToken realm="tracelake"',
    Identity.TASK: 'TraceTaskCapability realm="tracelake"',
    Identity.USER: 'Bearer realm="tracelake"',
}


class Authenticator(Protocol):
    async def __call__(self, scope: AsgiScope) -> Any:
        """Returns the caller; raises ``Unauthenticated`` when the credential is missing or not valid."""


@dataclass(frozen=True, slots=True)
class Authentication:
    """The authenticators of one surface."""

    authenticators: Mapping[Identity, Authenticator]

    async def check(self, scope: AsgiScope, identity: Identity) -> None:
        """Puts the caller into the scope's state."""
        if identity is not Identity.NONE:
            scope["state"]["caller"] = await self.authenticators[identity](scope)
            # Tasks are many, and their code is untrusted: their connections make room for those of workers.
            scope["state"]["stays"] = identity is not Identity.TASK


def capability_token(scope: AsgiScope) -> str:
    token = header(scope, _CAPABILITY)
    if not token:
        raise Unauthenticated("CapabilityMissing", f"{CAPABILITY_HEADER} is missing")
    return token


def bearer_token(scope: AsgiScope) -> str:
    scheme, _, token = (header(scope, _AUTHORIZATION) or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("UserTokenMissing", "'Authorization: Bearer' is missing")
    return token.strip()


def header(scope: AsgiScope, wanted: bytes) -> str | None:
    """The value of the first header of this name, which is given in lower case."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == wanted:
            return value.decode("latin-1")
    return None
