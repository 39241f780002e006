"""Published keys as a verifier keeps them, without becoming a way to hammer the Dispatcher.

A token with an unknown ``kid`` makes the cache look again, since keys rotate; but anybody can make up a
``kid``, so fetches, failed ones too, are at least ``min_interval`` apart, and callers that need one at
the same time share it. Keys are published longer before their use than ``max_age``, so an honest new
key is nearly always known before its first token arrives. While the Dispatcher can't be reached, known
keys go on serving up to ``max_stale``: an outage of the issuer is no reason to refuse good tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

import structlog

from tracelake.contracts.token_claims import TokenClaims
from tracelake.domain.errors import Unavailable
from tracelake.tokens import capability
from tracelake.tokens.jwks import PublicKeys, parse_jwks

log = structlog.get_logger(__name__)

Fetch = Callable[[str], Awaitable[bytes]]
"""GET a URL and return the body, or raise."""


class JwksCache:
    def __init__(
        self,
        url: str,
        fetch: Fetch,
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
        leeway: int = capability.LEEWAY_SECONDS,
    ) -> TokenClaims:
        keys = await self.keys_for(capability.key_id(token))
        return capability.verify(token, keys, audience=audience, issuer=issuer, now=now, leeway=leeway)

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
            self._tried_at = self._clock()
            self._refreshing = asyncio.create_task(self._fetch_once())
        # A caller that gives up must not take the shared fetch with it.
        await asyncio.shield(self._refreshing)

    async def _fetch_once(self) -> None:
        """Never raises: whether keys are too old is decided by those who wait."""
        try:
            async with asyncio.timeout(self._fetch_timeout):
                self._keys = parse_jwks(await self._fetch(self._url))
            self._fetched_at = self._clock()
        except Exception as error:
            log.warning("jwks_fetch_failed", error=type(error).__name__)
        finally:
            self._refreshing = None
