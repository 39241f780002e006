"""Two questions: an attempt's over the datasets of its token, a person's over what is published."""

from __future__ import annotations

from msgspec.json import Decoder

from tracelake.contracts.query_api import (
    ARROW_STREAM,
    MAX_REQUEST_BYTES,
    TASK_QUERY_PATH,
    USER_QUERY_PATH,
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


@endpoint(
    "POST",
    TASK_QUERY_PATH,
    Operation(identity=Identity.TASK, body=QueryRequest, answers=ANSWERS, refusals=(409,)),
)
async def task_query(request: QueryApiRequest) -> Answer:
    """One SELECT over exactly the datasets in the capability token, in the versions that stand there."""
    return await _answer(request)


@endpoint(
    "POST",
    USER_QUERY_PATH,
    Operation(identity=Identity.USER, body=QueryRequest, answers=ANSWERS, refusals=(409,)),
)
async def user_query(request: QueryApiRequest) -> Answer:
    """One SELECT over published datasets, in their current versions."""
    return await _answer(request)


async def _answer(request: QueryApiRequest) -> Answer:
    query = await request.decode(QUERY, MAX_REQUEST_BYTES)
    arrow = wants_arrow(header(request.scope, b"accept"))
    work = request.services.runner.run(request.asker, query, arrow=arrow)
    return await while_there(request.receive, work)


QUERY_ROUTES = (task_query, user_query, *HEALTH_ROUTES)
