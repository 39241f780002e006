"""The user surface: speaking for manual sources, pausing jobs, and what could not be delivered."""

from __future__ import annotations

from msgspec.json import Decoder

from tracelake.contracts.dispatcher_api import TriggerRequest, TriggerResponse
from tracelake.contracts.user_api import FailedDeliveries, JobPaused, OutboxQuery, Replayed, ReplayRequest
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest, decode_body
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.pause_job import set_job_paused
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.store import outbox, reads

TRIGGER = Decoder(TriggerRequest)
REPLAY = Decoder(ReplayRequest)
PAUSING = Operation(identity=Identity.USER, answers={200: JobPaused})


@endpoint(
    "POST",
    "/v1/sources/{dag:str}/{job:str}/trigger",
    Operation(identity=Identity.USER, body=TriggerRequest, answers={202: TriggerResponse}, refusals=(409,)),
)
async def trigger(request: ApiRequest) -> Answer:
    """An event on a manual source's output 0."""
    dag, job = request.path_text("dag"), request.path_text("job")
    event = await request.decode(TRIGGER)
    return json_answer(await trigger_source(request.services.ctx, dag, job, event), 202)


@endpoint("POST", "/v1/jobs/{dag:str}/{job:str}/pause", PAUSING)
async def pause(request: ApiRequest) -> Answer:
    """No new tasks for a job, and none of its tasks claimed, until it is resumed."""
    return await _set_paused(request, True)


@endpoint("POST", "/v1/jobs/{dag:str}/{job:str}/resume", PAUSING)
async def resume(request: ApiRequest) -> Answer:
    """Go on with a paused job; what came meanwhile is routed."""
    return await _set_paused(request, False)


async def _set_paused(request: ApiRequest, paused: bool) -> Answer:
    await request.refuse_body()
    dag, job = request.path_text("dag"), request.path_text("job")
    await set_job_paused(request.services.ctx, dag, job, paused, request.user.name)
    return json_answer(JobPaused(dag, job, paused))


@endpoint(
    "GET",
    "/v1/outbox/failed",
    Operation(identity=Identity.USER, query=OutboxQuery, answers={200: FailedDeliveries}),
)
async def failed_deliveries(request: ApiRequest) -> Answer:
    """What could not be delivered and was given up, oldest first."""
    query = request.query_as(OutboxQuery)
    return json_answer(await read(request, reads.failed_deliveries, query.limit))


@endpoint(
    "POST",
    "/v1/outbox/replay",
    Operation(identity=Identity.USER, body=ReplayRequest, body_required=False, answers={200: Replayed}),
)
async def replay(request: ApiRequest) -> Answer:
    """Try again what was given up: some of it, or without a body all of it."""
    asked = decode_body(REPLAY, await request.read() or b"{}")
    return json_answer(Replayed(await read(request, outbox.replay_failed, asked.outbox_ids)))


JOB_ROUTES = (trigger, pause, resume, failed_deliveries, replay)
