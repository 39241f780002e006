"""The task-scoped surface: what an attempt's own code may call, with its capability token and no other.

The same steps as the worker-only spelling, after the fence in the body was held against the token.
"""

from __future__ import annotations

from tracelake.contracts.dispatcher_api import (
    MAX_PROGRESS_BYTES,
    CompleteRequest,
    CompleteResponse,
    EventsRequest,
    EventsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
)
from tracelake.dispatcher.api.authenticators import check_own_attempt
from tracelake.dispatcher.api.request import COMPLETION_BODY, ApiRequest, check_size
from tracelake.dispatcher.api.worker_routes import COMPLETE, EVENTS, HEARTBEAT
from tracelake.dispatcher.steps.accept_events import accept_events
from tracelake.dispatcher.steps.heartbeat import heartbeat
from tracelake.domain.errors import Forbidden
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity


@endpoint(
    "POST",
    "/v1/task/heartbeat",
    Operation(
        identity=Identity.TASK,
        body=HeartbeatRequest,
        answers={200: HeartbeatResponse},
        refusals=(403, 404, 409),
    ),
)
async def own_heartbeat(request: ApiRequest) -> Answer:
    """Extend the own lease; a fresh capability token comes when the old one nears its end."""
    beat = await request.decode(HEARTBEAT)
    check_own_attempt(request.claims, beat.task_id, beat.attempt, beat.lease_token)
    check_size("progress", beat.progress, MAX_PROGRESS_BYTES)
    return json_answer(await heartbeat(request.services.ctx, beat, request.claims))


@endpoint(
    "POST",
    "/v1/task/complete",
    Operation(
        identity=Identity.TASK,
        body=CompleteRequest,
        answers={200: CompleteResponse},
        refusals=(403, 404, 409),
    ),
)
async def own_complete(request: ApiRequest) -> Answer:
    """End the own attempt and commit what it produced. Files are reported by the worker alone."""
    completion = await request.decode(COMPLETE, COMPLETION_BODY)
    check_own_attempt(request.claims, completion.task_id, completion.attempt, completion.lease_token)
    if any(output.location is not None or output.manifest is not None for output in completion.outputs):
        # They would stay the writer's own: who has them open could change what others read.
        raise Forbidden(
            "FilesByWorker", "files are reported by the worker, which makes them the platform's before"
        )
    return json_answer(await request.services.dispatch.complete(completion))


@endpoint(
    "POST",
    "/v1/task/events",
    Operation(
        identity=Identity.TASK,
        body=EventsRequest,
        answers={200: EventsResponse},
        refusals=(403, 404, 409),
    ),
)
async def own_events(request: ApiRequest) -> Answer:
    """Say what the own attempt has produced."""
    events = await request.decode(EVENTS)
    check_own_attempt(request.claims, events.task_id, events.attempt, events.lease_token)
    return json_answer(await accept_events(request.services.ctx, events))


TASK_ROUTES = (own_heartbeat, own_complete, own_events)
