"""The Query Service's routes: run a query, for an attempt over the datasets of its token or for a user over
published datasets, and download the caller's exported results.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.json import Decoder

from tracelake.contracts.query_api import (
    ARROW_STREAM,
    MAX_REQUEST_BYTES,
    PARQUET,
    TASK_EXPORTS_PATH,
    TASK_QUERY_PATH,
    USER_EXPORTS_PATH,
    USER_QUERY_PATH,
    ExportQuery,
    QueryExported,
    QueryRequest,
    QueryResponse,
)
from tracelake.query.answers import wants_arrow
from tracelake.query.caller import AuthenticatedCaller
from tracelake.query.run_query import QueryRunner
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity, header
from tracelake.serving.openapi import document
from tracelake.serving.request import Services, SurfaceRequest, while_connected
from tracelake.serving.response import Response
from tracelake.serving.surface import HEALTH_ROUTES

TITLE = "Tracelake Query Service"
QUERY = Decoder(QueryRequest)
ANSWERS = {200: (QueryResponse, QueryExported, ARROW_STREAM)}
DOWNLOAD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryServices(Services):
    runner: QueryRunner


class QueryApiRequest(SurfaceRequest):
    @property
    def services(self) -> QueryServices:
        services: QueryServices = self.scope["state"]["services"]
        return services

    @property
    def asker(self) -> AuthenticatedCaller:
        asker: AuthenticatedCaller = self.caller
        return asker


@endpoint(
    "POST",
    TASK_QUERY_PATH,
    Operation(identity=Identity.TASK, body=QueryRequest, answers=ANSWERS, refusals=(409, 429)),
)
async def task_query(request: QueryApiRequest) -> Response:
    """Run one SELECT over exactly the datasets in the capability token, in the token's versions."""
    return await _answer(request)


@endpoint(
    "POST",
    USER_QUERY_PATH,
    Operation(identity=Identity.USER, body=QueryRequest, answers=ANSWERS, refusals=(409, 429)),
)
async def user_query(request: QueryApiRequest) -> Response:
    """Run one SELECT over published datasets, in their current versions."""
    return await _answer(request)


@endpoint(
    "GET",
    TASK_EXPORTS_PATH,
    Operation(
        identity=Identity.TASK,
        query=ExportQuery,
        answers={200: PARQUET},
        refusals=(404, 409),
        seconds=DOWNLOAD_SECONDS,
    ),
)
async def task_export(request: QueryApiRequest) -> Response:
    """Download the Parquet file that a query of this attempt was exported to."""
    return await _exported(request)


@endpoint(
    "GET",
    USER_EXPORTS_PATH,
    Operation(
        identity=Identity.USER,
        query=ExportQuery,
        answers={200: PARQUET},
        refusals=(404,),
        seconds=DOWNLOAD_SECONDS,
    ),
)
async def user_export(request: QueryApiRequest) -> Response:
    """Download the Parquet file that one of the user's queries was exported to."""
    return await _exported(request)


async def _exported(request: QueryApiRequest) -> Response:
    return await request.services.runner.exported(request.asker, request.query_as(ExportQuery).query_id)


async def _answer(request: QueryApiRequest) -> Response:
    query = await request.decode(QUERY, MAX_REQUEST_BYTES)
    arrow = wants_arrow(header(request.scope, b"accept"))
    work = request.services.runner.run(request.asker, query, arrow=arrow)
    return await while_connected(request.receive, work)


QUERY_ROUTES = (task_query, user_query, task_export, user_export, *HEALTH_ROUTES)


def describe() -> bytes:
    """The OpenAPI document without serving it."""
    return document(TITLE, QUERY_ROUTES)
