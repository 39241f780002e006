"""Capability tokens: issued per attempt at the claim, verified wherever an attempt's own code calls.

Reasons of a refusal, all 401: ``TokenTooLong``, ``TokenInvalid`` (malformed, not ES256, claims of the
wrong type, a lifetime nobody issues), ``TokenUnknownKey``, ``TokenBadSignature``, ``TokenWrongIssuer``,
``TokenWrongAudience``, ``TokenNotYetValid``, ``TokenExpired``. Nothing in a token is read before its
signature holds. ``now`` is the caller's, from the state database where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4

import msgspec

from tracelake.contracts.token_claims import TokenClaims, TokenDataset, TokenPrefixes
from tracelake.domain.errors import Invalid, Unauthenticated
from tracelake.objects.prefix import ObjectPrefix
from tracelake.tokens import jws
from tracelake.tokens.jwks import PublicKeys
from tracelake.tokens.signing import MAX_LIFETIME_SECONDS, Signer

GRACE_SECONDS = 300
"""Beyond the task's timeout, so that its last report still gets through."""
LEEWAY_SECONDS = 30

_claims_decoder = msgspec.json.Decoder(TokenClaims)


@dataclass(frozen=True, slots=True)
class IssuedToken:
    token: str = field(repr=False)
    claims: TokenClaims

    @property
    def expires_at(self) -> datetime:
        return datetime.fromtimestamp(self.claims.exp, UTC)


def lifetime_seconds(timeout_seconds: int) -> int:
    if timeout_seconds < 1:
        raise ValueError(f"not a timeout: {timeout_seconds}")
    return min(timeout_seconds + GRACE_SECONDS, MAX_LIFETIME_SECONDS)


def renewal_due(expires_at: datetime, timeout_seconds: int, now: datetime) -> bool:
    """Whether a heartbeat should bring a fresh token: less than a quarter of the lifetime is left."""
    return (expires_at - now).total_seconds() * 4 < lifetime_seconds(timeout_seconds)


async def issue(
    signer: Signer,
    *,
    issuer: str,
    audience: str,
    org_id: UUID,
    task_id: UUID,
    attempt: int,
    timeout_seconds: int,
    now: datetime,
    datasets: Sequence[TokenDataset] = (),
    s3: TokenPrefixes | None = None,
    jti: UUID | None = None,
) -> IssuedToken:
    """A signed token for one attempt. Prefixes that aren't canonical are refused, never repaired."""
    prefixes = s3 or TokenPrefixes()
    for prefix in (*prefixes.read, *prefixes.write, *prefixes.scratch):
        if ObjectPrefix.parse(prefix).uri != prefix:
            raise Invalid("PrefixInvalid", f"not in canonical form: {prefix!r}")
    issued_at = _seconds(now)
    claims = TokenClaims(
        iss=issuer,
        aud=audience,
        sub=f"task/{task_id}/{attempt}",
        iat=issued_at,
        exp=issued_at + lifetime_seconds(timeout_seconds),
        jti=str(jti or uuid4()),
        org_id=org_id,
        task_id=task_id,
        attempt=attempt,
        datasets=tuple(datasets),
        s3=prefixes,
    )
    token = await signer.sign(claims)
    if len(token) > jws.MAX_TOKEN_BYTES:
        raise Invalid(
            "TokenTooLong", f"the task's datasets and prefixes don't fit a token: {len(token)} bytes"
        )
    return IssuedToken(token, claims)


def key_id(token: str) -> str:
    """The ``kid`` that a token names, unproven: only good for looking the key up."""
    return jws.parse(token).kid


def verify(
    token: str,
    keys: PublicKeys,
    *,
    audience: str,
    issuer: str,
    now: datetime,
    leeway: int = LEEWAY_SECONDS,
) -> TokenClaims:
    parsed = jws.parse(token)
    key = keys.get(parsed.kid)
    if key is None:
        raise Unauthenticated("TokenUnknownKey", "the token names a key that isn't published")
    if not parsed.signed_by(key):
        raise Unauthenticated("TokenBadSignature", "the token's signature doesn't hold")
    try:
        claims = _claims_decoder.decode(parsed.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unauthenticated("TokenInvalid", f"the token's claims are malformed: {error}") from None
    _check_parties(claims, audience, issuer)
    _check_times(claims, _seconds(now), leeway)
    return claims


def _check_parties(claims: TokenClaims, audience: str, issuer: str) -> None:
    if claims.iss != issuer:
        raise Unauthenticated("TokenWrongIssuer", "the token was issued by somebody else")
    if claims.aud != audience:
        raise Unauthenticated("TokenWrongAudience", "the token is meant for somebody else")


def _check_times(claims: TokenClaims, now: int, leeway: int) -> None:
    if not 0 < claims.exp - claims.iat <= MAX_LIFETIME_SECONDS:
        raise Unauthenticated("TokenInvalid", "the token's lifetime is not one that is ever issued")
    not_before = claims.iat if claims.nbf is msgspec.UNSET else max(claims.iat, claims.nbf)
    if now + leeway < not_before:
        raise Unauthenticated("TokenNotYetValid", "the token isn't valid yet")
    if now >= claims.exp + leeway:
        raise Unauthenticated("TokenExpired", "the token has expired")


def _seconds(now: datetime) -> int:
    if now.tzinfo is None:
        raise ValueError("a time without a zone can't be compared with a token's")
    return int(now.timestamp())
