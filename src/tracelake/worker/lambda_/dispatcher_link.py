"""What the invoker asks the Dispatcher for beyond tasks: bundles, and to be known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import httpx
import structlog

from tracelake.contracts.bundles import REGISTER_SECONDS
from tracelake.domain import errors
from tracelake.secret import Secret

_PAUSES = (0.1, 2.0)
_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_FAREWELL_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class DispatcherLink:
    def __init__(self, internal_url: str, worker_token: Secret) -> None:
        self._http = httpx.AsyncClient(
            base_url=internal_url,
            headers={"X-Trace-Worker-Token": worker_token.reveal()},
            timeout=_TIMEOUT,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def fetch_bundle(self, sha256: str) -> AsyncIterator[bytes]:
        """The zip's bytes, unverified. While the Dispatcher is away, this waits; whoever asked has a deadline."""
        pause, longest = _PAUSES
        while True:
            try:
                request = self._http.build_request("GET", "/internal/bundle", params={"sha256": sha256})
                answer = await self._http.send(request, stream=True)
            except httpx.TransportError as error:
                _log.warning("bundle_not_fetched", bundle=sha256, error=str(error) or type(error).__name__)
            else:
                try:
                    if answer.is_success:
                        async for part in _parts(answer, sha256):
                            yield part
                        return
                    if answer.status_code == httpx.codes.NOT_FOUND:
                        raise errors.NotFound("UnknownBundle", f"there is no bundle sha256:{sha256}")
                    _log.warning("bundle_not_fetched", bundle=sha256, status=answer.status_code)
                finally:
                    await answer.aclose()
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(longest, pause * 2)

    async def keep_registered(self, url: str, concurrency: int, on_first: Callable[[], None]) -> None:
        """For ever, since the Dispatcher forgets who says nothing. ``on_first`` is called once it knows."""
        known, first = True, True
        while True:
            try:
                await self._register(url, concurrency)
            except (httpx.HTTPError, errors.TracelakeError) as error:
                if known:
                    _log.warning("not_registered", error=str(error) or type(error).__name__)
                known = False
                await asyncio.sleep(random.uniform(0.2, 1.0))
                continue
            if first:
                on_first()
            if first or not known:
                _log.info("registered", url=url, concurrency=concurrency)
            known, first = True, False
            await asyncio.sleep(REGISTER_SECONDS)

    async def say_goodbye(self, url: str) -> None:
        """Nothing more for this invoker; if it can't be said, it is forgotten by itself."""
        try:
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await self._register(url, 0)
        except (httpx.HTTPError, errors.TracelakeError, TimeoutError) as error:
            _log.warning("not_signed_off", error=str(error) or type(error).__name__)

    async def _register(self, url: str, concurrency: int) -> None:
        answer = await self._http.post("/internal/invoker", json={"url": url, "concurrency": concurrency})
        if not answer.is_success:
            raise errors.TracelakeError("NotRegistered", f"{answer.status_code}: {answer.text[:300]}")


async def _parts(answer: httpx.Response, sha256: str) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_bytes():
            yield part
    except httpx.TransportError as error:
        why = f"the bundle sha256:{sha256} broke off on its way: {error or type(error).__name__}"
        raise errors.Unavailable("BundleNotFetched", why) from None
