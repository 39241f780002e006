"""The worker-only surface: what trusted wrappers and sinks call, with a worker token."""

from __future__ import annotations

from uuid import UUID

from msgspec import Struct
from msgspec.json import Decoder

from tracelake.contracts.dispatcher_api import (
    MAX_PROGRESS_BYTES,
    MAX_STATE_BYTES,
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
)
from tracelake.dispatcher.api.request import COMPLETION_BODY, ApiRequest, check_size
from tracelake.dispatcher.steps.accept_events import accept_events
from tracelake.dispatcher.steps.fetch_task import fetch_task
from tracelake.dispatcher.steps.heartbeat import heartbeat
from tracelake.dispatcher.steps.list_inputs import list_inputs
from tracelake.dispatcher.steps.save_state import save_state
from tracelake.domain.errors import TracelakeError
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.tokens.jwks import Jwks

CLAIM = Decoder(ClaimRequest)
CLAIM_BATCH = Decoder(ClaimBatchRequest)
HEARTBEAT = Decoder(HeartbeatRequest)
COMPLETE = Decoder(CompleteRequest)
COMPLETE_BATCH = Decoder(CompleteBatchRequest)
EVENTS = Decoder(EventsRequest)
STATE = Decoder(TaskStateRequest)


class FetchQuery(Struct, frozen=True, forbid_unknown_fields=True):
    task_id: UUID


@endpoint(
    "POST",
    "/internal/task-claim",
    Operation(identity=Identity.WORKER, body=ClaimRequest, answers={200: ClaimResponse}),
)
async def task_claim(request: ApiRequest) -> Answer:
    """Claim one task: a lease, a capability token and the payload, or why not."""
    return json_answer(await request.services.dispatch.claim(await request.decode(CLAIM)))


@endpoint(
    "POST",
    "/internal/task-claim-batch",
    Operation(identity=Identity.WORKER, body=ClaimBatchRequest, answers={200: ClaimBatchResponse}),
)
async def task_claim_batch(request: ApiRequest) -> Answer:
    """Claim several tasks in one call; each succeeds or not on its own."""
    batch = await request.decode(CLAIM_BATCH)
    return json_answer(ClaimBatchResponse(await request.services.dispatch.claim_many(batch.claims)))


@endpoint(
    "GET",
    "/internal/task-fetch",
    Operation(identity=Identity.WORKER, query=FetchQuery, answers={200: FetchResponse}, refusals=(404,)),
)
async def task_fetch(request: ApiRequest) -> Answer:
    """A task's payload and status; changes nothing."""
    query = request.query_as(FetchQuery)
    return json_answer(await fetch_task(request.services.ctx, query.task_id))


@endpoint(
    "POST",
    "/internal/heartbeat",
    Operation(
        identity=Identity.WORKER,
        body=HeartbeatRequest,
        answers={200: HeartbeatResponse},
        refusals=(404, 409),
    ),
)
async def worker_heartbeat(request: ApiRequest) -> Answer:
    """Extend the lease, tell how far the attempt is, and hear of cancel and pause."""
    beat = await request.decode(HEARTBEAT)
    check_size("progress", beat.progress, MAX_PROGRESS_BYTES)
    return json_answer(await heartbeat(request.services.ctx, beat))


@endpoint(
    "POST",
    "/internal/task-complete",
    Operation(
        identity=Identity.WORKER,
        body=CompleteRequest,
        answers={200: CompleteResponse},
        refusals=(403, 404, 409),
    ),
)
async def task_complete(request: ApiRequest) -> Answer:
    """End an attempt and commit what it produced; the same completion again is answered the same."""
    completion = await request.decode(COMPLETE, COMPLETION_BODY)
    return json_answer(await request.services.dispatch.complete(completion))


@endpoint(
    "POST",
    "/internal/task-complete-batch",
    Operation(identity=Identity.WORKER, body=CompleteBatchRequest, answers={200: CompleteBatchResponse}),
)
async def task_complete_batch(request: ApiRequest) -> Answer:
    """End several attempts in one call; each is accepted or refused on its own."""
    batch = (await request.decode(COMPLETE_BATCH, COMPLETION_BODY)).completions
    answers = await request.services.dispatch.complete_many(batch)
    return json_answer(
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
    "/internal/events",
    Operation(
        identity=Identity.WORKER,
        body=EventsRequest,
        answers={200: EventsResponse},
        refusals=(403, 404, 409),
    ),
)
async def worker_events(request: ApiRequest) -> Answer:
    """Say what an attempt has produced; kept and routed before the answer."""
    return json_answer(await accept_events(request.services.ctx, await request.decode(EVENTS)))


@endpoint(
    "POST",
    "/internal/task-state",
    Operation(
        identity=Identity.WORKER,
        body=TaskStateRequest,
        answers={200: TaskStateResponse},
        refusals=(404, 409),
    ),
)
async def task_state(request: ApiRequest) -> Answer:
    """Save what the next attempt of the same task finds in its payload."""
    saving = await request.decode(STATE)
    check_size("state", saving.state, MAX_STATE_BYTES)
    return json_answer(await save_state(request.services.ctx, saving))


@endpoint(
    "GET",
    "/internal/task-inputs",
    Operation(
        identity=Identity.WORKER,
        query=TaskInputsQuery,
        answers={200: TaskInputsResponse},
        refusals=(404, 409),
    ),
)
async def task_inputs(request: ApiRequest) -> Answer:
    """The committed files of an input that an attempt is to read, in pages."""
    return json_answer(await list_inputs(request.services.ctx, request.query_as(TaskInputsQuery)))


@endpoint("GET", "/internal/jwks/task", Operation(identity=Identity.NOBODY, answers={200: Jwks}))
async def task_jwks(request: ApiRequest) -> Answer:
    """The public keys that prove capability tokens."""
    services = request.services
    return json_answer(await services.ctx.signer.jwks(await services.now()))


WORKER_ROUTES = (
    task_claim,
    task_claim_batch,
    task_fetch,
    worker_heartbeat,
    task_complete,
    task_complete_batch,
    worker_events,
    task_state,
    task_inputs,
    task_jwks,
)
