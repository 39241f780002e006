"""The user surface: where a task and where a range of blocks come from."""

from __future__ import annotations

from tracelake.contracts.explain import (
    ExplainRangeQuery,
    ExplainTaskQuery,
    RangeExplanation,
    TaskExplanation,
)
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.store import explain, explain_range


@endpoint(
    "GET",
    "/v1/tasks/{task_id:str}/explain",
    Operation(identity=Identity.USER, query=ExplainTaskQuery, answers={200: TaskExplanation}),
)
async def explain_task(request: ApiRequest) -> Answer:
    """The events that caused a task, the attempts that said them, and so on back to the sources."""
    task_id, query = request.path_uuid("task_id"), request.query_as(ExplainTaskQuery)
    return json_answer(await read(request, explain.task, task_id, query.depth))


@endpoint(
    "GET",
    "/v1/datasets/{name:str}/explain",
    Operation(identity=Identity.USER, query=ExplainRangeQuery, answers={200: RangeExplanation}),
)
async def explain_dataset(request: ApiRequest) -> Answer:
    """Which tasks and attempts wrote a range of blocks, what was checked, taken back, and is missing."""
    name, query = request.path_text("name"), request.query_as(ExplainRangeQuery)
    return json_answer(await read(request, explain_range.range_of, request.user.org_id, name, query))


EXPLAIN_VIEWS = (explain_task, explain_dataset)
