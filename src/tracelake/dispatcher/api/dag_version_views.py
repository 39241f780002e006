"""The user surface: the files that a DAG was deployed by."""

from __future__ import annotations

import re

from tracelake.contracts.user_api import DagVersionDetail, DagVersionPage, DagVersionQuery
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.problems import FieldProblem, InvalidRequest
from tracelake.store import dag_versions

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@endpoint(
    "GET",
    "/v1/dags/{dag:str}/versions",
    Operation(identity=Identity.USER, query=DagVersionQuery, answers={200: DagVersionPage}),
)
async def list_versions(request: ApiRequest) -> Answer:
    """Every version of a DAG that was ever deployed, newest first."""
    dag, query = request.path_text("dag"), request.query_as(DagVersionQuery)
    return json_answer(await read(request, dag_versions.versions, request.user.org_id, dag, query))


@endpoint(
    "GET",
    "/v1/dags/{dag:str}/versions/{version:str}",
    Operation(identity=Identity.USER, answers={200: DagVersionDetail}),
)
async def show_version(request: ApiRequest) -> Answer:
    """One version with its file as it was deployed; to roll back, deploy that file again."""
    dag, text = request.path_text("dag"), request.path_text("version")
    if _NUMBER.fullmatch(text) is None:
        raise InvalidRequest([FieldProblem("version", "not the number of a version")])
    return json_answer(await read(request, dag_versions.version, request.user.org_id, dag, int(text)))


DAG_VERSION_VIEWS = (list_versions, show_version)
