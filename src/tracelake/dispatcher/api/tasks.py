"""Routes of tasks: for workers by a worker token, for an attempt's own code by its capability token, for people.

On the internal port a worker may act for every task. The task-scoped routes below ``/v1/task/`` are for code that
isn't trusted: every one of them checks that the fence in the request is the token's own. The user port shows tasks,
and cancels or retries them.
"""

from __future__ import annotations

from uuid import UUID

from msgspec import Struct
from msgspec.json import Decoder

from tracelake.contracts.dispatcher_api import (
    CLAIM_BATCH_PATH,
    CLAIM_PATH,
    COMPLETE_BATCH_PATH,
    COMPLETE_PATH,
    EVENTS_PATH,
    FETCH_PATH,
    HEARTBEAT_PATH,
    MAX_PROGRESS_BYTES,
    MAX_STATE_BYTES,
    TASK_INPUTS_PATH,
    TASK_STATE_PATH,
    WORKER_PATH,
    WORKER_SEEN_SECONDS,
    BatchAnswer,
    ClaimBatchRequest,
    ClaimBatchResponse,
    ClaimRequest,
    ClaimResponse,
    CompleteBatchRequest,
    CompleteBatchResponse,
    CompleteRequest,
    CompleteResponse,
    EventsRequest,
    EventsResponse,
    FetchResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    TaskInputsQuery,
    TaskInputsResponse,
    TaskStateRequest,
    TaskStateResponse,
    WorkerRegistered,
    WorkerRegistration,
)
from tracelake.contracts.token_claims import JWKS_PATH
from tracelake.contracts.user_api import TaskChanged, TaskDetail, TaskPage, TaskQuery
from tracelake.dispatcher.api.authenticators import check_own_attempt
from tracelake.dispatcher.api.request import COMPLETION_BODY, ApiRequest, read
from tracelake.dispatcher.steps.accept_events import accept_events
from tracelake.dispatcher.steps.interventions import cancel_task, retry_task
from tracelake.dispatcher.steps.running_attempt import fetch_task, heartbeat, list_inputs, save_state
from tracelake.dispatcher.steps.upkeep import register_worker
from tracelake.domain.errors import Forbidden, TracelakeError
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.request import check_size
from tracelake.serving.response import Response, json_response
from tracelake.store import reads
from tracelake.tokens.jose import Jwks

CLAIM = Decoder(ClaimRequest)
CLAIM_BATCH = Decoder(ClaimBatchRequest)
HEARTBEAT = Decoder(HeartbeatRequest)
COMPLETE = Decoder(CompleteRequest)
COMPLETE_BATCH = Decoder(CompleteBatchRequest)
EVENTS = Decoder(EventsRequest)
STATE = Decoder(TaskStateRequest)
REGISTRATION = Decoder(WorkerRegistration)
CHANGING = Operation(identity=Identity.USER, answers={200: TaskChanged}, refusals=(409,))


class FetchQuery(Struct, frozen=True, forbid_unknown_fields=True):
    task_id: UUID


@endpoint(
    "POST",
    CLAIM_PATH,
    Operation(identity=Identity.WORKER, body=ClaimRequest, answers={200: ClaimResponse}),
)
async def task_claim(request: ApiRequest) -> Response:
    """Claim one task: answers a lease, a capability token and the payload, or the reason why not."""
    return json_response(await request.services.dispatch.claim(await request.decode(CLAIM)))


@endpoint(
    "POST",
    CLAIM_BATCH_PATH,
    Operation(identity=Identity.WORKER, body=ClaimBatchRequest, answers={200: ClaimBatchResponse}),
)
async def task_claim_batch(request: ApiRequest) -> Response:
    """Claim several tasks in one call; each succeeds or not on its own."""
    batch = await request.decode(CLAIM_BATCH)
    return json_response(ClaimBatchResponse(await request.services.dispatch.claim_many(batch.claims)))


@endpoint(
    "POST",
    WORKER_PATH,
    Operation(identity=Identity.WORKER, body=WorkerRegistration, answers={200: WorkerRegistered}),
)
async def worker_registration(request: ApiRequest) -> Response:
    """Say that a worker serves its runtime; to be repeated for as long as it runs. Claims don't depend on it."""
    registration = await request.decode(REGISTRATION)
    await register_worker(request.services.ctx, registration)
    return json_response(WorkerRegistered(registration.worker_id, WORKER_SEEN_SECONDS))


@endpoint(
    "GET",
    FETCH_PATH,
    Operation(identity=Identity.WORKER, query=FetchQuery, answers={200: FetchResponse}, refusals=(404,)),
)
async def task_fetch(request: ApiRequest) -> Response:
    """A task's payload and status; changes nothing."""
    query = request.query_as(FetchQuery)
    return json_response(await fetch_task(request.services.ctx, query.task_id))


@endpoint(
    "POST",
    HEARTBEAT_PATH,
    Operation(
        identity=Identity.WORKER,
        body=HeartbeatRequest,
        answers={200: HeartbeatResponse},
        refusals=(404, 409),
    ),
)
async def worker_heartbeat(request: ApiRequest) -> Response:
    """Extend the lease and report progress; the answer says whether to cancel or pause."""
    beat = await request.decode(HEARTBEAT)
    check_size("progress", beat.progress, MAX_PROGRESS_BYTES)
    return json_response(await heartbeat(request.services.ctx, beat))


@endpoint(
    "POST",
    COMPLETE_PATH,
    Operation(
        identity=Identity.WORKER,
        body=CompleteRequest,
        answers={200: CompleteResponse},
        refusals=(403, 404, 409),
    ),
)
async def task_complete(request: ApiRequest) -> Response:
    """End an attempt and commit its outputs; the same completion again gets the same answer."""
    completion = await request.decode(COMPLETE, COMPLETION_BODY)
    return json_response(await request.services.dispatch.complete(completion))


@endpoint(
    "POST",
    COMPLETE_BATCH_PATH,
    Operation(identity=Identity.WORKER, body=CompleteBatchRequest, answers={200: CompleteBatchResponse}),
)
async def task_complete_batch(request: ApiRequest) -> Response:
    """End several attempts in one call; each is accepted or refused on its own."""
    batch = (await request.decode(COMPLETE_BATCH, COMPLETION_BODY)).completions
    answers = await request.services.dispatch.complete_many(batch)
    return json_response(
        CompleteBatchResponse(
            [
                BatchAnswer(asked.task_id, answer.status, reason=answer.reason, detail=answer.message)
                if isinstance(answer, TracelakeError)
                else BatchAnswer(asked.task_id, 200, answer)
                for asked, answer in zip(batch, answers, strict=True)
            ]
        )
    )


@endpoint(
    "POST",
    EVENTS_PATH,
    Operation(
        identity=Identity.WORKER,
        body=EventsRequest,
        answers={200: EventsResponse},
        refusals=(403, 404, 409),
    ),
)
async def worker_events(request: ApiRequest) -> Response:
    """Send events of an attempt; they are recorded and routed before the answer."""
    return json_response(await accept_events(request.services.ctx, await request.decode(EVENTS)))


@endpoint(
    "POST",
    TASK_STATE_PATH,
    Operation(
        identity=Identity.WORKER,
        body=TaskStateRequest,
        answers={200: TaskStateResponse},
        refusals=(404, 409),
    ),
)
async def task_state(request: ApiRequest) -> Response:
    """Save state that the next attempt of the same task finds in its payload."""
    saving = await request.decode(STATE)
    check_size("state", saving.state, MAX_STATE_BYTES)
    return json_response(await save_state(request.services.ctx, saving))


@endpoint(
    "GET",
    TASK_INPUTS_PATH,
    Operation(
        identity=Identity.WORKER,
        query=TaskInputsQuery,
        answers={200: TaskInputsResponse},
        refusals=(404, 409),
    ),
)
async def task_inputs(request: ApiRequest) -> Response:
    """The committed files of an input that an attempt is to read, in pages."""
    return json_response(await list_inputs(request.services.ctx, request.query_as(TaskInputsQuery)))


@endpoint("GET", JWKS_PATH, Operation(identity=Identity.NONE, answers={200: Jwks}))
async def task_jwks(request: ApiRequest) -> Response:
    """The public keys that prove capability tokens."""
    services = request.services
    return json_response(await services.ctx.signer.jwks(await services.now()))


WORKER_ROUTES = (
    task_claim,
    task_claim_batch,
    task_fetch,
    worker_registration,
    worker_heartbeat,
    task_complete,
    task_complete_batch,
    worker_events,
    task_state,
    task_inputs,
    task_jwks,
)


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
async def own_heartbeat(request: ApiRequest) -> Response:
    """Extend the calling attempt's lease; the response has a new capability token before the old one expires."""
    beat = await request.decode(HEARTBEAT)
    check_own_attempt(request.claims, beat.task_id, beat.attempt, beat.lease_token)
    check_size("progress", beat.progress, MAX_PROGRESS_BYTES)
    return json_response(await heartbeat(request.services.ctx, beat, request.claims))


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
async def own_complete(request: ApiRequest) -> Response:
    """Complete the calling attempt and commit its outputs. Only workers may report files."""
    completion = await request.decode(COMPLETE, COMPLETION_BODY)
    check_own_attempt(request.claims, completion.task_id, completion.attempt, completion.lease_token)
    if any(output.location is not None or output.manifest is not None for output in completion.outputs):
        # The writer would keep write access to files that others read.
        raise Forbidden(
            "FilesByWorker", "only workers may report files: they take ownership of the files first"
        )
    return json_response(await request.services.dispatch.complete(completion))


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
async def own_events(request: ApiRequest) -> Response:
    """Send events of the calling attempt."""
    events = await request.decode(EVENTS)
    check_own_attempt(request.claims, events.task_id, events.attempt, events.lease_token)
    return json_response(await accept_events(request.services.ctx, events))


TASK_ROUTES = (own_heartbeat, own_complete, own_events)


@endpoint("GET", "/v1/tasks", Operation(identity=Identity.USER, query=TaskQuery, answers={200: TaskPage}))
async def list_tasks(request: ApiRequest) -> Response:
    """Tasks, newest first."""
    return json_response(await read(request, reads.tasks, request.query_as(TaskQuery)))


@endpoint("GET", "/v1/tasks/{task_id}", Operation(identity=Identity.USER, answers={200: TaskDetail}))
async def show_task(request: ApiRequest) -> Response:
    """One task with its attempts, inputs, outputs and events, and the reason if it waits."""
    return json_response(await read(request, reads.task, request.path_uuid("task_id")))


@endpoint("POST", "/v1/tasks/{task_id}/cancel", CHANGING)
async def cancel(request: ApiRequest) -> Response:
    """Cancel a task at once; a running attempt learns of it by its next heartbeat."""
    task_id = request.path_uuid("task_id")
    await request.refuse_body()
    await cancel_task(request.services.ctx, task_id, request.user.name)
    return json_response(TaskChanged(task_id, "Canceled"))


@endpoint("POST", "/v1/tasks/{task_id}/retry", CHANGING)
async def retry(request: ApiRequest) -> Response:
    """Queue a task again at once, also when no attempts are left."""
    task_id = request.path_uuid("task_id")
    await request.refuse_body()
    await retry_task(request.services.ctx, task_id, request.user.name)
    return json_response(TaskChanged(task_id, "Queued"))


TASK_VIEWS = (list_tasks, show_task, cancel, retry)
