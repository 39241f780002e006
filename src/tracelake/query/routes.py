"""Two questions, an attempt's over the datasets of its token and a person's over what is published; and the files
that their answers were exported to, each for whoever asked for it."""

from __future__ import annotations

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
from tracelake.query.services import QueryApiRequest
from tracelake.serving.answer import Answer
from tracelake.serving.departure import while_there
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.health_routes import HEALTH_ROUTES
from tracelake.serving.identity import Identity, header

QUERY = Decoder(QueryRequest)
ANSWERS = {200: (QueryResponse, QueryExported, ARROW_STREAM)}
DOWNLOAD_SECONDS = 3600.0


@endpoint(
    "POST",
    TASK_QUERY_PATH,
    Operation(identity=Identity.TASK, body=QueryRequest, answers=ANSWERS, refusals=(409, 429)),
)
async def task_query(request: QueryApiRequest) -> Answer:
    """One SELECT over exactly the datasets in the capability token, in the versions that stand there."""
    return await _answer(request)


@endpoint(
    "POST",
    USER_QUERY_PATH,
    Operation(identity=Identity.USER, body=QueryRequest, answers=ANSWERS, refusals=(409, 429)),
)
async def user_query(request: QueryApiRequest) -> Answer:
    """One SELECT over published datasets, in their current versions."""
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
async def task_export(request: QueryApiRequest) -> Answer:
    """The Parquet file that a query of this attempt was exported to."""
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
async def user_export(request: QueryApiRequest) -> Answer:
    """The Parquet file that a query of this user's was exported to."""
    return await _exported(request)


async def _exported(request: QueryApiRequest) -> Answer:
    return await request.services.runner.exported(request.asker, request.query_as(ExportQuery).query_id)


async def _answer(request: QueryApiRequest) -> Answer:
    query = await request.decode(QUERY, MAX_REQUEST_BYTES)
    arrow = wants_arrow(header(request.scope, b"accept"))
    work = request.services.runner.run(request.asker, query, arrow=arrow)
    return await while_there(request.receive, work)


QUERY_ROUTES = (task_query, user_query, task_export, user_export, *HEALTH_ROUTES)
