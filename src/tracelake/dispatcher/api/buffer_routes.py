"""Buffered datasets on the internal port: attempts publish to them, and their sinks ask and report."""

from __future__ import annotations

from msgspec.json import Decoder

from tracelake.contracts.buffers import (
    MAX_BATCH_BYTES,
    BufferPublishRequest,
    BufferPublishResponse,
    BufferSchemaQuery,
    BufferSchemaResponse,
    DeadLetterRequest,
    DeadLetterResponse,
)
from tracelake.dispatcher.api.authenticators import check_own_attempt
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.dispatcher.steps.dead_letters import bury_message, schema_now
from tracelake.dispatcher.steps.publish_buffer import publish_buffer
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity

PUBLISH = Decoder(BufferPublishRequest)
DEAD_LETTER = Decoder(DeadLetterRequest)


@endpoint(
    "POST",
    "/v1/task/buffer-publish",
    Operation(
        identity=Identity.TASK,
        body=BufferPublishRequest,
        answers={200: BufferPublishResponse},
        refusals=(403, 404, 409),
    ),
)
async def buffer_publish(request: ApiRequest) -> Answer:
    """Publish records to a buffered dataset of the own DAG; kept before the answer, written once or not at all."""
    publish = await request.decode(PUBLISH, MAX_BATCH_BYTES)
    check_own_attempt(request.claims, publish.task_id, publish.attempt, publish.lease_token)
    return json_answer(await publish_buffer(request.services.ctx, publish, request.claims))


@endpoint(
    "GET",
    "/internal/buffer-schema",
    Operation(
        identity=Identity.WORKER,
        query=BufferSchemaQuery,
        answers={200: BufferSchemaResponse},
        refusals=(404,),
    ),
)
async def buffer_schema(request: ApiRequest) -> Answer:
    """A buffered dataset's schema as it is deployed now."""
    query = request.query_as(BufferSchemaQuery)
    return json_answer(await schema_now(request.services.ctx, query.dataset_uuid))


@endpoint(
    "POST",
    "/internal/buffer-dead-letter",
    Operation(
        identity=Identity.WORKER,
        body=DeadLetterRequest,
        answers={200: DeadLetterResponse},
        refusals=(403, 404, 409),
    ),
)
async def buffer_dead_letter(request: ApiRequest) -> Answer:
    """Keep a message that the sink gave up, whole and with its reason."""
    return json_answer(await bury_message(request.services.ctx, await request.decode(DEAD_LETTER)))


BUFFER_ROUTES = (buffer_publish, buffer_schema, buffer_dead_letter)
