"""The way to the Query Service, for what the user port passes on."""

from __future__ import annotations

import httpx

from tracelake.contracts.query_api import NO_QUERY_SERVICE, USER_QUERY_PATH
from tracelake.domain.errors import Unavailable

CONNECT_SECONDS = 5.0
CONNECTIONS = 200


class QueryService:
    """``url`` is the Query Service's, or None where there is none."""

    def __init__(self, url: str | None) -> None:
        self._url = None if url is None else url.rstrip("/") + USER_QUERY_PATH
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=16),
            trust_env=False,
        )

    async def ask(self, headers: list[tuple[bytes, bytes]], body: bytes) -> httpx.Response:
        """The head of the answer; its body is still to be read."""
        if self._url is None:
            raise Unavailable(
                NO_QUERY_SERVICE,
                "this stack has no Query Service: start one with `tracelake query-service`, and tell the "
                "Dispatcher where it is by --query-url or TRACELAKE_QUERY_URL",
            )
        identity = (b"accept-encoding", b"identity")
        request = self._http.build_request("POST", self._url, headers=[*headers, identity], content=body)
        try:
            return await self._http.send(request, stream=True)
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            raise Unavailable(
                "QueryServiceUnavailable", f"the Query Service can't be reached: {why}"
            ) from None

    async def close(self) -> None:
        await self._http.aclose()
