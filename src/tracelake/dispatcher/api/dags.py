"""Routes of DAGs and jobs on the user port: plan, deploy, versions, trigger, pause, resume, failed deliveries."""

from __future__ import annotations

import re

import msgspec
from msgspec.json import Decoder

from tracelake.contracts.dispatcher_api import TriggerRequest, TriggerResponse
from tracelake.contracts.problem import FieldProblem, InvalidRequest
from tracelake.contracts.user_api import (
    DagPage,
    DagQuery,
    DagVersionDetail,
    DagVersionPage,
    DagVersionQuery,
    DagWarning,
    DeployedJob,
    DeployedOutput,
    DeployResponse,
    FailedDeliveries,
    JobPaused,
    OutboxQuery,
    PlannedDelivery,
    PlannedJob,
    PlannedName,
    PlanResponse,
    Replayed,
    ReplayRequest,
)
from tracelake.dispatcher.api.request import ApiRequest, read
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.deploy_dag import Deployed, deploy_dag, plan_dag
from tracelake.dispatcher.steps.interventions import pause_job, resume_job
from tracelake.domain.dag.plan import DeployPlan, render
from tracelake.domain.errors import BadRequest
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.request import decode_body
from tracelake.serving.response import Response, json_response
from tracelake.store import outbox, reads

YAML = "application/yaml"
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
TRIGGER = Decoder(TriggerRequest)
REPLAY = Decoder(ReplayRequest)
PAUSING = Operation(identity=Identity.USER, answers={200: JobPaused})


@endpoint(
    "POST",
    "/v1/dags",
    Operation(
        identity=Identity.USER, body=YAML, answers={200: DeployResponse, 201: DeployResponse}, refusals=(409,)
    ),
)
async def deploy(request: ApiRequest) -> Response:
    """Deploy a DAG file; 200 when exactly this file is known already."""
    done = await deploy_dag(request.services.ctx, await _yaml(request), request.user.name)
    return json_response(_deployed(done), 201 if done.created else 200)


@endpoint("POST", "/v1/dags/plan", Operation(identity=Identity.USER, body=YAML, answers={200: PlanResponse}))
async def plan(request: ApiRequest) -> Response:
    """The changes that a deploy of this file would make; makes none."""
    return json_response(_planned(await plan_dag(request.services.ctx, await _yaml(request))))


@endpoint("GET", "/v1/dags", Operation(identity=Identity.USER, query=DagQuery, answers={200: DagPage}))
async def list_dags(request: ApiRequest) -> Response:
    """The active DAGs and their jobs."""
    return json_response(await read(request, reads.dags, request.query_as(DagQuery)))


async def _yaml(request: ApiRequest) -> str:
    try:
        text = (await request.read()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest("MalformedYaml", f"the file is not UTF-8: {error.reason}") from None
    # Postgres can't store one in a text column.
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
    return DeployResponse(done.dag_name, done.dag_version, jobs, done.buffers, _warnings(done.plan))


def _planned(found: DeployPlan) -> PlanResponse:
    return PlanResponse(
        found.dag,
        found.changes_nothing,
        msgspec.convert(msgspec.to_builtins(found.jobs), list[PlannedJob]),
        msgspec.convert(msgspec.to_builtins(found.publish), list[PlannedName]),
        render(found),
        msgspec.convert(msgspec.to_builtins(found.deliver), list[PlannedDelivery]),
        _warnings(found),
    )


def _warnings(found: DeployPlan) -> list[DagWarning]:
    return [DagWarning(each.line, each.column, each.field, each.message) for each in found.warnings]


DAG_ROUTES = (deploy, plan, list_dags)


@endpoint(
    "GET",
    "/v1/dags/{dag}/versions",
    Operation(identity=Identity.USER, query=DagVersionQuery, answers={200: DagVersionPage}),
)
async def list_versions(request: ApiRequest) -> Response:
    """Every version of a DAG that was ever deployed, newest first."""
    dag, query = request.path_text("dag"), request.query_as(DagVersionQuery)
    return json_response(await read(request, reads.dag_versions, request.user.org_id, dag, query))


@endpoint(
    "GET",
    "/v1/dags/{dag}/versions/{version}",
    Operation(identity=Identity.USER, answers={200: DagVersionDetail}),
)
async def show_version(request: ApiRequest) -> Response:
    """One version with its file as it was deployed; to roll back, deploy that file again."""
    dag, text = request.path_text("dag"), request.path_text("version")
    if _NUMBER.fullmatch(text) is None:
        raise InvalidRequest([FieldProblem("version", "not the number of a version")])
    return json_response(await read(request, reads.dag_version, request.user.org_id, dag, int(text)))


DAG_VERSION_VIEWS = (list_versions, show_version)


@endpoint(
    "POST",
    "/v1/sources/{dag}/{job}/trigger",
    Operation(identity=Identity.USER, body=TriggerRequest, answers={202: TriggerResponse}, refusals=(409,)),
)
async def trigger(request: ApiRequest) -> Response:
    """Trigger a manual source: an event on its output 0, or a task if it runs code; then `event_id` is null."""
    dag, job = request.path_text("dag"), request.path_text("job")
    event = await request.decode(TRIGGER)
    return json_response(await trigger_source(request.services.ctx, dag, job, event), 202)


@endpoint("POST", "/v1/jobs/{dag}/{job}/pause", PAUSING)
async def pause(request: ApiRequest) -> Response:
    """Pause a job: no tasks are created or claimed until it is resumed."""
    await request.refuse_body()
    dag, job = request.path_text("dag"), request.path_text("job")
    await pause_job(request.services.ctx, dag, job, request.user.name)
    return json_response(JobPaused(dag, job, True))


@endpoint("POST", "/v1/jobs/{dag}/{job}/resume", PAUSING)
async def resume(request: ApiRequest) -> Response:
    """Resume a job that a user paused; events received meanwhile are routed."""
    await request.refuse_body()
    dag, job = request.path_text("dag"), request.path_text("job")
    held = await resume_job(request.services.ctx, dag, job, request.user.name)
    return json_response(JobPaused(dag, job, held))


@endpoint(
    "GET",
    "/v1/outbox/failed",
    Operation(identity=Identity.USER, query=OutboxQuery, answers={200: FailedDeliveries}),
)
async def failed_deliveries(request: ApiRequest) -> Response:
    """Outbox entries whose delivery was given up, oldest first."""
    query = request.query_as(OutboxQuery)
    return json_response(await read(request, reads.failed_deliveries, query.limit))


@endpoint(
    "POST",
    "/v1/outbox/replay",
    Operation(identity=Identity.USER, body=ReplayRequest, body_required=False, answers={200: Replayed}),
)
async def replay(request: ApiRequest) -> Response:
    """Retry failed deliveries: the listed ones, or all without a body."""
    asked = decode_body(REPLAY, await request.read() or b"{}")
    return json_response(Replayed(await read(request, outbox.replay_failed, asked.outbox_ids)))


JOB_ROUTES = (trigger, pause, resume, failed_deliveries, replay)
