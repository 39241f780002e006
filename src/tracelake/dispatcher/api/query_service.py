"""The way to the Query Service, for what the user port passes on."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import httpx

from tracelake.contracts.query_api import NO_QUERY_SERVICE, USER_EXPORTS_PATH, USER_QUERY_PATH
from tracelake.domain.errors import Unavailable

CONNECT_SECONDS = 5.0
CONNECTIONS = 200


class QueryService:
    """``url`` is the Query Service's, or None where there is none."""

    def __init__(self, url: str | None) -> None:
        self._url = None if url is None else url.rstrip("/")
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=16),
            trust_env=False,
        )

    async def ask(self, headers: list[tuple[bytes, bytes]], body: bytes) -> httpx.Response:
        """The head of the answer; its body is still to be read."""
        return await self._send("POST", USER_QUERY_PATH, headers, content=body)

    async def exported(self, headers: list[tuple[bytes, bytes]], query_id: UUID) -> httpx.Response:
        """The same for a file that a query was exported to."""
        return await self._send("GET", USER_EXPORTS_PATH, headers, params={"query_id": str(query_id)})

    async def _send(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], **request: Any
    ) -> httpx.Response:
        if self._url is None:
            raise Unavailable(
                NO_QUERY_SERVICE,
                "this stack has no Query Service: start one with `tracelake query-service`, and tell the "
                "Dispatcher where it is by --query-url or TRACELAKE_QUERY_URL",
            )
        identity = (b"accept-encoding", b"identity")
        asked = self._http.build_request(method, self._url + path, headers=[*headers, identity], **request)
        try:
            return await self._http.send(asked, stream=True)
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            raise Unavailable(
                "QueryServiceUnavailable", f"the Query Service can't be reached: {why}"
            ) from None

    async def close(self) -> None:
        await self._http.aclose()
