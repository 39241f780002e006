"""The user port passes queries on to the Query Service, which listens where people can't reach it.

The caller is authenticated here and, by the same credential, there. The answer goes back as it comes,
piece by piece; a caller that goes away ends the query. Nothing of a query or its answer is kept or logged here.
"""

from __future__ import annotations

import httpx
from litestar.types import Receive, Scope, Send
from msgspec.json import Decoder

from tracelake.contracts.query_api import (
    ARROW_STREAM,
    MAX_REQUEST_BYTES,
    PARQUET,
    USER_EXPORTS_PATH,
    USER_QUERY_PATH,
    ExportQuery,
    QueryExported,
    QueryRequest,
    QueryResponse,
)
from tracelake.dispatcher.api.request import ApiRequest, decode_body
from tracelake.serving.answer import Answer
from tracelake.serving.departure import while_there
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity

PROXY_SECONDS = 3900.0
"""Longer than the Query Service lets any query take: it is the one that ends them."""

_PASSED_ON = (b"authorization", b"accept", b"content-type")
_PASSED_BACK = ("content-type", "content-length", "www-authenticate", "retry-after")
_OURS = "x-trace-"
_QUERY = Decoder(QueryRequest)


class PassedAnswer(Answer):
    """What the Query Service answers, as it comes; if that ends early, so does the caller's connection."""

    __slots__ = ("upstream",)

    def __init__(self, upstream: httpx.Response) -> None:
        super().__init__(b"", status=upstream.status_code)
        self.upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(receive, self._pass(send))
        finally:
            await self.upstream.aclose()

    async def _pass(self, send: Send) -> None:
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
async def query(request: ApiRequest) -> Answer:
    """One SELECT over published datasets, in their current versions; answered by the Query Service."""
    body = await request.read(MAX_REQUEST_BYTES)
    decode_body(_QUERY, body)
    headers = [(name, value) for name, value in request.scope["headers"] if name in _PASSED_ON]
    upstream = await while_there(request.receive, request.services.query.ask(headers, body))
    return PassedAnswer(upstream)


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
async def export(request: ApiRequest) -> Answer:
    """The Parquet file that a query of this user's was exported to; from the Query Service."""
    wanted = request.query_as(ExportQuery)
    headers = [(name, value) for name, value in request.scope["headers"] if name in _PASSED_ON]
    work = request.services.query.exported(headers, wanted.query_id)
    return PassedAnswer(await while_there(request.receive, work))


QUERY_ROUTES = (query, export)
