"""The user surface: what is missing of a dataset, and how far a job is with a range of blocks."""

from __future__ import annotations

from tracelake.contracts.coverage import BackfillQuery, BackfillState, GapPage, GapQuery
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.store import coverage


@endpoint(
    "GET",
    "/v1/datasets/{name:str}/gaps",
    Operation(identity=Identity.USER, query=GapQuery, answers={200: GapPage}),
)
async def list_gaps(request: ApiRequest) -> Answer:
    """Block ranges that are missing between committed partitions, by block."""
    name, query = request.path_text("name"), request.query_as(GapQuery)
    return json_answer(await read(request, coverage.gaps, request.user.org_id, name, query))


@endpoint(
    "GET",
    "/v1/jobs/{dag:str}/{job:str}/backfill",
    Operation(identity=Identity.USER, query=BackfillQuery, answers={200: BackfillState}),
)
async def show_backfill(request: ApiRequest) -> Answer:
    """What a job has of a range of blocks, what is on its way, and the events that would ask for the rest."""
    dag, job, query = request.path_text("dag"), request.path_text("job"), request.query_as(BackfillQuery)
    return json_answer(await read(request, coverage.backfill, dag, job, query))


COVERAGE_VIEWS = (list_gaps, show_backfill)
