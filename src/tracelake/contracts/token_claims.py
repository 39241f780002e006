"""The claims of a capability token: the only permissions that an attempt's own code has.

One token belongs to one ``(task_id, attempt)``. Types are strict, so that a verifier never has to handle an
``attempt`` that is a string; unknown claims are ignored, as RFC 7519 requires, so that a newer Dispatcher can add
one without locking older verifiers out.
"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

ISSUER = "tracelake"
AUDIENCE = "tracelake-task"
JWKS_PATH = "/internal/jwks/task"
"""Where the Dispatcher publishes the keys that tokens are verified with."""

ClaimText = Annotated[str, Meta(min_length=1, max_length=512)]
# Up to here, readers that use doubles for JSON numbers keep them exact.
Seconds = Annotated[int, Meta(ge=0, le=2**53)]


class TokenDataset(Struct, frozen=True, kw_only=True):
    """A dataset version that the attempt may read; ``name`` is null while it isn't published."""

    dataset_uuid: UUID
    dataset_version: UUID
    name: str | None


class TokenPrefixes(Struct, frozen=True, kw_only=True):
    """Canonical directory prefixes (``s3://bucket/prefix/``, or ``file:///dir/`` in Lite)."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()


class TokenClaims(Struct, frozen=True, kw_only=True):
    """Times are whole seconds since the epoch and come from the state database's clock."""

    iss: ClaimText
    aud: ClaimText
    sub: ClaimText
    iat: Seconds
    exp: Seconds
    jti: ClaimText
    org_id: UUID
    task_id: UUID
    attempt: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    datasets: tuple[TokenDataset, ...]
    s3: TokenPrefixes
    nbf: Seconds | UnsetType = UNSET
