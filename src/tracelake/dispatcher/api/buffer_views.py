"""Buffered datasets on the user port: how full they are, and their dead letters."""

from __future__ import annotations

import msgspec
from msgspec.json import Decoder

from tracelake.contracts.buffers import (
    BufferDetail,
    BufferPage,
    DeadLetterDetail,
    DeadLetterPage,
    DeadLetterQuery,
    DeadLettersDropped,
    DeadLettersReplayed,
    DeadLetterSummary,
    DropDeadLetters,
    ReplayDeadLetters,
)
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest, decode_body
from tracelake.dispatcher.steps import dead_letters
from tracelake.dispatcher.steps.view_buffers import find_buffer, view_buffer, view_buffers
from tracelake.domain.errors import Invalid, NotFound
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.store import buffers
from tracelake.store.buffers import KnownBuffer

REPLAY = Decoder(ReplayDeadLetters)
DROP = Decoder(DropDeadLetters)


@endpoint("GET", "/v1/buffers", Operation(identity=Identity.USER, answers={200: BufferPage}))
async def list_buffers(request: ApiRequest) -> Answer:
    """Every buffered dataset with what waits for it."""
    return json_answer(BufferPage(await view_buffers(request.services.ctx, request.services.queue)))


@endpoint("GET", "/v1/buffers/{name:str}", Operation(identity=Identity.USER, answers={200: BufferDetail}))
async def show_buffer(request: ApiRequest) -> Answer:
    """One buffered dataset, by name or uuid: its schema, who writes it, and what waits for it."""
    return json_answer(
        await view_buffer(request.services.ctx, request.services.queue, await _buffer(request))
    )


@endpoint(
    "GET",
    "/v1/buffers/{name:str}/dead-letters",
    Operation(identity=Identity.USER, query=DeadLetterQuery, answers={200: DeadLetterPage}),
)
async def list_dead_letters(request: ApiRequest) -> Answer:
    """What the sink of a dataset gave up, oldest first."""
    query = request.query_as(DeadLetterQuery)
    buffer = await _buffer(request)
    rows = await read(
        request, buffers.list_dead_letters, buffer.dataset_uuid, query.after or 0, query.limit + 1
    )
    found = [msgspec.convert(dict(row), DeadLetterSummary) for row in rows[: query.limit]]
    following = str(found[-1].dead_letter_id) if len(rows) > query.limit else None
    return json_answer(DeadLetterPage(found, following))


@endpoint(
    "GET",
    "/v1/dead-letters/{dead_letter_id:str}",
    Operation(identity=Identity.USER, answers={200: DeadLetterDetail}),
)
async def show_dead_letter(request: ApiRequest) -> Answer:
    """One dead letter with its whole message."""
    text = request.path_text("dead_letter_id")
    row = None
    if text.isascii() and text.isdigit() and len(text) < 19:
        row = await read(request, buffers.dead_letter, request.user.org_id, int(text))
    if row is None:
        raise NotFound("UnknownDeadLetter", f"there is no dead letter {text}")
    whole = {**row, "message": msgspec.json.decode(row["message"])}
    return json_answer(msgspec.convert(whole, DeadLetterDetail))


@endpoint(
    "POST",
    "/v1/buffers/{name:str}/replay",
    Operation(
        identity=Identity.USER,
        body=ReplayDeadLetters,
        body_required=False,
        answers={200: DeadLettersReplayed},
        refusals=(409,),
    ),
)
async def replay_dead_letters(request: ApiRequest) -> Answer:
    """Send dead letters to the sink again: some of them, or without a body all of them."""
    asked = decode_body(REPLAY, await request.read() or b"{}")
    buffer = await _buffer(request)
    ctx, actor = request.services.ctx, request.user.name
    return json_answer(
        DeadLettersReplayed(await dead_letters.replay(ctx, buffer, asked.dead_letter_ids, actor))
    )


@endpoint(
    "POST",
    "/v1/buffers/{name:str}/drop",
    Operation(identity=Identity.USER, body=DropDeadLetters, answers={200: DeadLettersDropped}),
)
async def drop_dead_letters(request: ApiRequest) -> Answer:
    """Forget dead letters for good: some of them, or all."""
    asked = await request.decode(DROP)
    if (asked.dead_letter_ids is None) == (not asked.all):
        raise Invalid("NothingNamed", "give either 'dead_letter_ids' or 'all': true")
    buffer = await _buffer(request)
    ctx, actor = request.services.ctx, request.user.name
    return json_answer(DeadLettersDropped(await dead_letters.drop(ctx, buffer, asked.dead_letter_ids, actor)))


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
