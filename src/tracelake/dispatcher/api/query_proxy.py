"""Routes that pass queries of the user port on to the Query Service, which listens where people can't reach it.

The caller is authenticated here and, by the same credential, there. The answer is passed back in pieces as it
arrives; a caller that disconnects ends the query. Queries and answers are neither kept nor logged here.
``QueryService`` is the HTTP client by which they reach it.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import httpx
from msgspec.json import Decoder

from tracelake.contracts.headers import AUTHORIZATION_HEADER, OWN_PREFIX
from tracelake.contracts.query_api import (
    ARROW_STREAM,
    MAX_REQUEST_BYTES,
    NO_QUERY_SERVICE,
    PARQUET,
    USER_EXPORTS_PATH,
    USER_QUERY_PATH,
    ExportQuery,
    QueryExported,
    QueryRequest,
    QueryResponse,
)
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.domain.errors import Unavailable
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.request import decode_body, while_connected
from tracelake.serving.response import AsgiReceive, AsgiScope, AsgiSend, Response

PROXY_SECONDS = 3900.0
"""Longer than the Query Service's own limit, so that the service ends queries and not the proxy."""

CONNECT_SECONDS = 5.0
CONNECTIONS = 200
_PASSED_ON = (AUTHORIZATION_HEADER.lower().encode(), b"accept", b"content-type")
_PASSED_BACK = ("content-type", "content-length", "www-authenticate", "retry-after")
_OURS = OWN_PREFIX.lower()
_QUERY = Decoder(QueryRequest)


class QueryService:
    """``url`` is the Query Service's, or None where there is none."""

    def __init__(self, url: str | None) -> None:
        self._url = None if url is None else url.rstrip("/")
        self._http = httpx.AsyncClient(
            # A query may take an hour before its first byte; the route has a limit of its own.
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=16),
            # The calls carry users' tokens, which a proxy from the environment must not see.
            trust_env=False,
        )

    async def ask(self, headers: list[tuple[bytes, bytes]], body: bytes) -> httpx.Response:
        """Send a query; returns the head of the answer, whose body is still to be read."""
        return await self._send("POST", USER_QUERY_PATH, headers, content=body)

    async def exported(self, headers: list[tuple[bytes, bytes]], query_id: UUID) -> httpx.Response:
        """Likewise for the file that a query was exported to."""
        return await self._send("GET", USER_EXPORTS_PATH, headers, params={"query_id": str(query_id)})

    async def _send(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], **request: Any
    ) -> httpx.Response:
        if self._url is None:
            raise Unavailable(
                NO_QUERY_SERVICE,
                "this stack has no Query Service: start one with `tracelake query-service`, and give the "
                "Dispatcher its address by --query-url or TRACELAKE_QUERY_URL",
            )
        # Answers are passed on as they arrive, without the header that would declare a compression.
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


class ProxiedResponse(Response):
    """The Query Service's answer, passed on in pieces; if it ends early, so does the caller's connection."""

    __slots__ = ("upstream",)

    def __init__(self, upstream: httpx.Response) -> None:
        super().__init__(b"", status=upstream.status_code)
        self.upstream = upstream

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        try:
            await while_connected(receive, self._pass(send))
        finally:
            await self.upstream.aclose()

    async def _pass(self, send: AsgiSend) -> None:
        headers = [
            (name.encode(), value.encode("latin-1"))
            for name, value in self.upstream.headers.items()
            if name in _PASSED_BACK or name.startswith(_OURS)
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        async for piece in self.upstream.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@endpoint(
    "POST",
    USER_QUERY_PATH,
    Operation(
        identity=Identity.USER,
        body=QueryRequest,
        answers={200: (QueryResponse, QueryExported, ARROW_STREAM)},
        refusals=(409, 429),
        seconds=PROXY_SECONDS,
    ),
)
async def query(request: ApiRequest) -> Response:
    """One SELECT over published datasets, in their current versions; answered by the Query Service."""
    body = await request.read(MAX_REQUEST_BYTES)
    # Refused here like on every other route; what is passed on are the bytes that came.
    decode_body(_QUERY, body)
    headers = [(name, value) for name, value in request.scope["headers"] if name in _PASSED_ON]
    upstream = await while_connected(request.receive, request.services.query.ask(headers, body))
    return ProxiedResponse(upstream)


@endpoint(
    "GET",
    USER_EXPORTS_PATH,
    Operation(
        identity=Identity.USER,
        query=ExportQuery,
        answers={200: PARQUET},
        refusals=(404,),
        seconds=PROXY_SECONDS,
    ),
)
async def export(request: ApiRequest) -> Response:
    """The Parquet file that a query of this user's was exported to; from the Query Service."""
    wanted = request.query_as(ExportQuery)
    headers = [(name, value) for name, value in request.scope["headers"] if name in _PASSED_ON]
    work = request.services.query.exported(headers, wanted.query_id)
    return ProxiedResponse(await while_connected(request.receive, work))


QUERY_ROUTES = (query, export)
