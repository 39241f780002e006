"""The user surface: datasets by published name or uuid, and their committed partitions."""

from __future__ import annotations

from tracelake.contracts.user_api import (
    DatasetDetail,
    DatasetPage,
    DatasetQuery,
    PartitionPage,
    PartitionQuery,
)
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.store import reads


@endpoint(
    "GET", "/v1/datasets", Operation(identity=Identity.USER, query=DatasetQuery, answers={200: DatasetPage})
)
async def list_datasets(request: ApiRequest) -> Answer:
    """Every dataset in its current version, published or not."""
    return json_answer(await read(request, reads.datasets, request.query_as(DatasetQuery)))


@endpoint("GET", "/v1/datasets/{name:str}", Operation(identity=Identity.USER, answers={200: DatasetDetail}))
async def show_dataset(request: ApiRequest) -> Answer:
    """One dataset in its current version, with its generations and how far it is behind."""
    return json_answer(await read(request, reads.dataset, request.user.org_id, request.path_text("name")))


@endpoint(
    "GET",
    "/v1/datasets/{name:str}/partitions",
    Operation(identity=Identity.USER, query=PartitionQuery, answers={200: PartitionPage}),
)
async def list_partitions(request: ApiRequest) -> Answer:
    """The committed partitions that readers see, by block."""
    name, query = request.path_text("name"), request.query_as(PartitionQuery)
    return json_answer(await read(request, reads.partitions, request.user.org_id, name, query))


DATASET_VIEWS = (list_datasets, show_dataset, list_partitions)
