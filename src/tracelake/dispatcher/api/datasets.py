"""Routes of datasets on the user port: datasets, followed chains, missing ranges, backfills, explanations."""

from __future__ import annotations

from tracelake.contracts.coverage import BackfillQuery, BackfillState, GapPage, GapQuery
from tracelake.contracts.explain import ExplainRangeQuery, ExplainTaskQuery, RangeExplanation, TaskExplanation
from tracelake.contracts.user_api import (
    ChainPage,
    DatasetDetail,
    DatasetPage,
    DatasetQuery,
    PartitionPage,
    PartitionQuery,
)
from tracelake.dispatcher.api.request import ApiRequest, read
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.response import Response, json_response
from tracelake.store import chains, coverage, explain, reads


@endpoint(
    "GET", "/v1/datasets", Operation(identity=Identity.USER, query=DatasetQuery, answers={200: DatasetPage})
)
async def list_datasets(request: ApiRequest) -> Response:
    """Every dataset in its current version, published or not."""
    return json_response(await read(request, reads.datasets, request.query_as(DatasetQuery)))


@endpoint("GET", "/v1/datasets/{name}", Operation(identity=Identity.USER, answers={200: DatasetDetail}))
async def show_dataset(request: ApiRequest) -> Response:
    """One dataset in its current version, with its generations and how far it is behind."""
    return json_response(await read(request, reads.dataset, request.user.org_id, request.path_text("name")))


@endpoint(
    "GET",
    "/v1/datasets/{name}/partitions",
    Operation(identity=Identity.USER, query=PartitionQuery, answers={200: PartitionPage}),
)
async def list_partitions(request: ApiRequest) -> Response:
    """The committed partitions that readers see, by block."""
    name, query = request.path_text("name"), request.query_as(PartitionQuery)
    return json_response(await read(request, reads.partitions, request.user.org_id, name, query))


@endpoint("GET", "/v1/chains", Operation(identity=Identity.USER, answers={200: ChainPage}))
async def list_chains(request: ApiRequest) -> Response:
    """The followers of chains: how far they are, how old that knowledge is, and what keeps them."""
    return json_response(await read(request, chains.chains))


DATASET_VIEWS = (list_datasets, show_dataset, list_partitions, list_chains)


@endpoint(
    "GET",
    "/v1/datasets/{name}/gaps",
    Operation(identity=Identity.USER, query=GapQuery, answers={200: GapPage}),
)
async def list_gaps(request: ApiRequest) -> Response:
    """Block ranges that are missing between committed partitions, by block."""
    name, query = request.path_text("name"), request.query_as(GapQuery)
    return json_response(await read(request, coverage.gaps, request.user.org_id, name, query))


@endpoint(
    "GET",
    "/v1/jobs/{dag}/{job}/backfill",
    Operation(identity=Identity.USER, query=BackfillQuery, answers={200: BackfillState}),
)
async def show_backfill(request: ApiRequest) -> Response:
    """A job's progress with a range of blocks, and the events that would request the rest."""
    dag, job, query = request.path_text("dag"), request.path_text("job"), request.query_as(BackfillQuery)
    return json_response(await read(request, coverage.backfill, dag, job, query))


COVERAGE_VIEWS = (list_gaps, show_backfill)


@endpoint(
    "GET",
    "/v1/tasks/{task_id}/explain",
    Operation(identity=Identity.USER, query=ExplainTaskQuery, answers={200: TaskExplanation}),
)
async def explain_task(request: ApiRequest) -> Response:
    """The events that caused a task, the attempts that sent them, and so on back to the sources."""
    task_id, query = request.path_uuid("task_id"), request.query_as(ExplainTaskQuery)
    return json_response(await read(request, explain.task, task_id, query.depth))


@endpoint(
    "GET",
    "/v1/datasets/{name}/explain",
    Operation(identity=Identity.USER, query=ExplainRangeQuery, answers={200: RangeExplanation}),
)
async def explain_dataset(request: ApiRequest) -> Response:
    """The tasks and attempts that wrote a range of blocks, its checks, invalidations and gaps."""
    name, query = request.path_text("name"), request.query_as(ExplainRangeQuery)
    return json_response(await read(request, explain.range_of, request.user.org_id, name, query))


EXPLAIN_VIEWS = (explain_task, explain_dataset)
