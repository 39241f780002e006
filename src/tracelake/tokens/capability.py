"""Capability tokens: issued per attempt at the claim, verified wherever an attempt's own code calls.

Reasons of a refusal, all 401: ``TokenTooLong``, ``TokenInvalid`` (malformed, not ES256, claims of the wrong type,
a lifetime that is never issued), ``TokenUnknownKey``, ``TokenBadSignature``, ``TokenWrongIssuer``,
``TokenWrongAudience``, ``TokenNotYetValid``, ``TokenExpired``. ``verify`` reads no claim before the signature has
been verified; ``claimed_attempt`` reads two of a token that another process will verify. ``now`` is the caller's,
from the state database where there is one.

``JwksCache`` keeps published keys for a verifier without letting clients hammer the Dispatcher. A token with an
unknown ``kid`` makes it fetch again, since keys rotate; but any client can make up a ``kid``, so fetches, failed
ones too, are at least ``min_interval`` apart, and concurrent callers share one. Keys are published longer before
their use than ``max_age``, so a new key is nearly always known before its first token arrives. While the
Dispatcher can't be reached, known keys are used for up to ``max_stale``: an outage of the issuer is no reason to
refuse good tokens.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4

import msgspec
import structlog

from tracelake.contracts.token_claims import TokenClaims, TokenDataset, TokenPrefixes
from tracelake.domain.errors import Invalid, Unauthenticated, Unavailable
from tracelake.objects.base import ObjectPrefix
from tracelake.tokens import jose
from tracelake.tokens.jose import PublicKeys, parse_jwks
from tracelake.tokens.signing import MAX_LIFETIME_SECONDS, Signer

GRACE_SECONDS = 300
"""Beyond the task's timeout, so that its last report still gets through."""
LEEWAY_SECONDS = 30
FetchKeys = Callable[[str], Awaitable[bytes]]
"""GET a URL and return the body, or raise."""

_log = structlog.get_logger(__name__)
_claims_decoder = msgspec.json.Decoder(TokenClaims)
_COMPACT = re.compile(r"[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+", re.ASCII)


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
    # Verifiers refuse a longer one: better the claim fails than each call of the attempt.
    if len(token) > jose.MAX_TOKEN_BYTES:
        raise Invalid(
            "TokenTooLong", f"the task's datasets and prefixes don't fit a token: {len(token)} bytes"
        )
    return IssuedToken(token, claims)


def key_id(token: str) -> str:
    """The ``kid`` that a token names, unverified: only good for looking the key up."""
    return jose.parse(token).kid


class ClaimedAttempt(msgspec.Struct, frozen=True):
    """The task and attempt that a token claims to belong to."""

    task_id: UUID
    attempt: int


_attempt_decoder = msgspec.json.Decoder(ClaimedAttempt)


def claimed_attempt(token: str) -> ClaimedAttempt | None:
    """Unverified: only good for refusing a token of another attempt early. None if it is no token."""
    found = _COMPACT.fullmatch(token)
    if found is None or len(token) > jose.MAX_TOKEN_BYTES:
        return None
    try:
        padded = found[1] + "=" * (-len(found[1]) % 4)
        return _attempt_decoder.decode(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None


def verify(
    token: str,
    keys: PublicKeys,
    *,
    audience: str,
    issuer: str,
    now: datetime,
    leeway: int = LEEWAY_SECONDS,
) -> TokenClaims:
    parsed = jose.parse(token)
    key = keys.get(parsed.kid)
    if key is None:
        raise Unauthenticated("TokenUnknownKey", "the token names a key that isn't published")
    if not parsed.signed_by(key):
        raise Unauthenticated("TokenBadSignature", "the token's signature is invalid")
    try:
        claims = _claims_decoder.decode(parsed.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unauthenticated("TokenInvalid", f"the token's claims are malformed: {error}") from None
    _check_parties(claims, audience, issuer)
    _check_times(claims, _seconds(now), leeway)
    return claims


def _check_parties(claims: TokenClaims, audience: str, issuer: str) -> None:
    if claims.iss != issuer:
        raise Unauthenticated("TokenWrongIssuer", "the token has another issuer")
    if claims.aud != audience:
        raise Unauthenticated("TokenWrongAudience", "the token has another audience")


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


class JwksCache:
    """Published keys as a verifier keeps them; see the module."""

    def __init__(
        self,
        url: str,
        fetch: FetchKeys,
        *,
        max_age: float = 300,
        min_interval: float = 5,
        max_stale: float = 3600,
        fetch_timeout: float = 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._fetch = fetch
        self._max_age = max_age
        self._min_interval = min_interval
        self._max_stale = max_stale
        self._fetch_timeout = fetch_timeout
        self._clock = clock
        self._keys: PublicKeys = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def verify(
        self,
        token: str,
        *,
        audience: str,
        issuer: str,
        now: datetime,
        leeway: int = LEEWAY_SECONDS,
    ) -> TokenClaims:
        keys = await self.keys_for(key_id(token))
        return verify(token, keys, audience=audience, issuer=issuer, now=now, leeway=leeway)

    async def keys_for(self, kid: str) -> PublicKeys:
        """The freshest keys that may be had for this ``kid``; it needn't be among them."""
        if kid not in self._keys or self._age() > self._max_age:
            await self._refresh()
        if self._age() > self._max_stale:
            raise Unavailable("JwksUnavailable", "the keys that prove tokens can't be fetched")
        return self._keys

    def _age(self) -> float:
        return float("inf") if self._fetched_at is None else self._clock() - self._fetched_at

    async def _refresh(self) -> None:
        if self._refreshing is None:
            if self._tried_at is not None and self._clock() - self._tried_at < self._min_interval:
                return
            # Noted before the outcome: a failed fetch counts as one too.
            self._tried_at = self._clock()
            self._refreshing = asyncio.create_task(self._fetch_once())
        # A caller that gives up must not take the shared fetch with it.
        await asyncio.shield(self._refreshing)

    async def _fetch_once(self) -> None:
        """Never raises: the waiting callers decide whether the keys are too old."""
        try:
            async with asyncio.timeout(self._fetch_timeout):
                self._keys = parse_jwks(await self._fetch(self._url))
            self._fetched_at = self._clock()
        except Exception as error:
            _log.warning("jwks_fetch_failed", error=type(error).__name__)
        finally:
            self._refreshing = None
