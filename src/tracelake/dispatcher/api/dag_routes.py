"""The user surface: DAG files in, what they would change or have changed out."""

from __future__ import annotations

import msgspec

from tracelake.contracts.user_api import (
    DagPage,
    DagQuery,
    DeployedJob,
    DeployedOutput,
    DeployResponse,
    PlannedJob,
    PlannedName,
    PlanResponse,
)
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.dispatcher.steps.deploy_dag import Deployed, deploy_dag, plan_dag
from tracelake.domain.dag.plan import DeployPlan
from tracelake.domain.dag.render_plan import render
from tracelake.domain.errors import BadRequest
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.store import reads

YAML = "application/yaml"


@endpoint(
    "POST",
    "/v1/dags",
    Operation(
        identity=Identity.USER, body=YAML, answers={200: DeployResponse, 201: DeployResponse}, refusals=(409,)
    ),
)
async def deploy(request: ApiRequest) -> Answer:
    """Deploy a DAG file; 200 when this very file is known already."""
    done = await deploy_dag(request.services.ctx, await _yaml(request), request.user.name)
    return json_answer(_deployed(done), 201 if done.created else 200)


@endpoint("POST", "/v1/dags/plan", Operation(identity=Identity.USER, body=YAML, answers={200: PlanResponse}))
async def plan(request: ApiRequest) -> Answer:
    """What a deploy of this file would change; changes nothing."""
    return json_answer(_planned(await plan_dag(request.services.ctx, await _yaml(request))))


@endpoint("GET", "/v1/dags", Operation(identity=Identity.USER, query=DagQuery, answers={200: DagPage}))
async def list_dags(request: ApiRequest) -> Answer:
    """The active DAGs and their jobs."""
    return json_answer(await read(request, reads.dags, request.query_as(DagQuery)))


async def _yaml(request: ApiRequest) -> str:
    try:
        text = (await request.read()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest("MalformedYaml", f"the file is not UTF-8: {error.reason}") from None
    if "\0" in text:
        raise BadRequest("MalformedYaml", "the file contains a NUL character")
    return text


def _deployed(done: Deployed) -> DeployResponse:
    jobs = [
        DeployedJob(
            name,
            [DeployedOutput(o.output_index, o.dataset_uuid, o.dataset_version, o.dataset) for o in outputs],
        )
        for name, outputs in done.jobs.items()
    ]
    return DeployResponse(done.dag_name, done.dag_version, jobs, done.buffers)


def _planned(found: DeployPlan) -> PlanResponse:
    return PlanResponse(
        found.dag,
        found.changes_nothing,
        msgspec.convert(msgspec.to_builtins(found.jobs), list[PlannedJob]),
        msgspec.convert(msgspec.to_builtins(found.publish), list[PlannedName]),
        render(found),
    )


DAG_ROUTES = (deploy, plan, list_dags)
