"""Routes of buffered datasets: publishing and sinks on the internal port, views and dead letters for people."""

from __future__ import annotations

import msgspec
from msgspec.json import Decoder

from tracelake.contracts.buffers import (
    BUFFER_SCHEMA_PATH,
    DEAD_LETTER_PATH,
    MAX_BATCH_BYTES,
    PUBLISH_PATH,
    BufferDetail,
    BufferPage,
    BufferPublishRequest,
    BufferPublishResponse,
    BufferSchemaQuery,
    BufferSchemaResponse,
    DeadLetterDetail,
    DeadLetterPage,
    DeadLetterQuery,
    DeadLetterRequest,
    DeadLetterResponse,
    DeadLettersDropped,
    DeadLettersReplayed,
    DeadLetterSummary,
    DropDeadLetters,
    ReplayDeadLetters,
)
from tracelake.dispatcher.api.authenticators import check_own_attempt
from tracelake.dispatcher.api.request import ApiRequest, read
from tracelake.dispatcher.steps import buffered_datasets
from tracelake.dispatcher.steps.buffered_datasets import (
    current_schema,
    find_buffer,
    record_dead_letter,
    view_buffer,
    view_buffers,
)
from tracelake.dispatcher.steps.publish_buffer import publish_buffer
from tracelake.domain.errors import Invalid, NotFound
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.request import decode_body
from tracelake.serving.response import Response, json_response
from tracelake.store import buffers
from tracelake.store.buffers import KnownBuffer

PUBLISH = Decoder(BufferPublishRequest)
DEAD_LETTER = Decoder(DeadLetterRequest)
REPLAY = Decoder(ReplayDeadLetters)
DROP = Decoder(DropDeadLetters)


@endpoint(
    "POST",
    PUBLISH_PATH,
    Operation(
        identity=Identity.TASK,
        body=BufferPublishRequest,
        answers={200: BufferPublishResponse},
        refusals=(403, 404, 409),
    ),
)
async def buffer_publish(request: ApiRequest) -> Response:
    """Publish records to a buffered dataset of the task's DAG; durable before the answer, written exactly once."""
    publish = await request.decode(PUBLISH, MAX_BATCH_BYTES)
    check_own_attempt(request.claims, publish.task_id, publish.attempt, publish.lease_token)
    return json_response(await publish_buffer(request.services.ctx, publish, request.claims))


@endpoint(
    "GET",
    BUFFER_SCHEMA_PATH,
    Operation(
        identity=Identity.WORKER,
        query=BufferSchemaQuery,
        answers={200: BufferSchemaResponse},
        refusals=(404,),
    ),
)
async def buffer_schema(request: ApiRequest) -> Response:
    """The deployed schema of a buffered dataset."""
    query = request.query_as(BufferSchemaQuery)
    return json_response(await current_schema(request.services.ctx, query.dataset_uuid))


@endpoint(
    "POST",
    DEAD_LETTER_PATH,
    Operation(
        identity=Identity.WORKER,
        body=DeadLetterRequest,
        answers={200: DeadLetterResponse},
        refusals=(403, 404, 409),
    ),
)
async def buffer_dead_letter(request: ApiRequest) -> Response:
    """Keep a message that the sink gave up, complete and with the reason."""
    return json_response(await record_dead_letter(request.services.ctx, await request.decode(DEAD_LETTER)))


BUFFER_ROUTES = (buffer_publish, buffer_schema, buffer_dead_letter)


@endpoint("GET", "/v1/buffers", Operation(identity=Identity.USER, answers={200: BufferPage}))
async def list_buffers(request: ApiRequest) -> Response:
    """Every buffered dataset with its waiting messages."""
    return json_response(BufferPage(await view_buffers(request.services.ctx, request.services.queue)))


@endpoint("GET", "/v1/buffers/{name}", Operation(identity=Identity.USER, answers={200: BufferDetail}))
async def show_buffer(request: ApiRequest) -> Response:
    """One buffered dataset, by name or uuid: its schema, its writers and its waiting messages."""
    return json_response(
        await view_buffer(request.services.ctx, request.services.queue, await _buffer(request))
    )


@endpoint(
    "GET",
    "/v1/buffers/{name}/dead-letters",
    Operation(identity=Identity.USER, query=DeadLetterQuery, answers={200: DeadLetterPage}),
)
async def list_dead_letters(request: ApiRequest) -> Response:
    """The messages that the sink of a dataset gave up, oldest first."""
    query = request.query_as(DeadLetterQuery)
    buffer = await _buffer(request)
    rows = await read(
        request, buffers.list_dead_letters, buffer.dataset_uuid, query.after or 0, query.limit + 1
    )
    found = [msgspec.convert(dict(row), DeadLetterSummary) for row in rows[: query.limit]]
    following = str(found[-1].dead_letter_id) if len(rows) > query.limit else None
    return json_response(DeadLetterPage(found, following))


@endpoint(
    "GET",
    "/v1/dead-letters/{dead_letter_id}",
    Operation(identity=Identity.USER, answers={200: DeadLetterDetail}),
)
async def show_dead_letter(request: ApiRequest) -> Response:
    """One dead letter with its whole message."""
    text = request.path_text("dead_letter_id")
    row = None
    # isdigit alone accepts other scripts and superscripts; 19 digits may exceed a bigint, which is an error.
    if text.isascii() and text.isdigit() and len(text) < 19:
        row = await read(request, buffers.dead_letter, request.user.org_id, int(text))
    if row is None:
        raise NotFound("UnknownDeadLetter", f"there is no dead letter {text}")
    whole = {**row, "message": msgspec.json.decode(row["message"])}
    return json_response(msgspec.convert(whole, DeadLetterDetail))


@endpoint(
    "POST",
    "/v1/buffers/{name}/replay",
    Operation(
        identity=Identity.USER,
        body=ReplayDeadLetters,
        body_required=False,
        answers={200: DeadLettersReplayed},
        refusals=(409,),
    ),
)
async def replay_dead_letters(request: ApiRequest) -> Response:
    """Send dead letters to the sink again: some of them, or without a body all of them."""
    asked = decode_body(REPLAY, await request.read() or b"{}")
    buffer = await _buffer(request)
    ctx, actor = request.services.ctx, request.user.name
    return json_response(
        DeadLettersReplayed(
            await buffered_datasets.replay_dead_letters(ctx, buffer, asked.dead_letter_ids, actor)
        )
    )


@endpoint(
    "POST",
    "/v1/buffers/{name}/drop",
    Operation(identity=Identity.USER, body=DropDeadLetters, answers={200: DeadLettersDropped}),
)
async def drop_dead_letters(request: ApiRequest) -> Response:
    """Forget dead letters for good: some of them, or all."""
    asked = await request.decode(DROP)
    if (asked.dead_letter_ids is None) == (not asked.all):
        raise Invalid("NothingNamed", "give either 'dead_letter_ids' or 'all': true")
    buffer = await _buffer(request)
    ctx, actor = request.services.ctx, request.user.name
    return json_response(
        DeadLettersDropped(
            await buffered_datasets.drop_dead_letters(ctx, buffer, asked.dead_letter_ids, actor)
        )
    )


async def _buffer(request: ApiRequest) -> KnownBuffer:
    return await find_buffer(request.services.ctx, request.path_text("name"))


BUFFER_VIEWS = (
    list_buffers,
    show_buffer,
    list_dead_letters,
    show_dead_letter,
    replay_dead_letters,
    drop_dead_letters,
)
