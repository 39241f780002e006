"""Routes of sources: the scheduler's and a task's on the internal port; calls of webhooks; and those of people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from msgspec import Struct
from msgspec.json import Decoder

from tracelake.contracts.sources import (
    MAX_HOOK_BYTES,
    MAX_INLINE_BODY,
    SCHEDULES_PATH,
    SOURCE_BODY_PATH,
    TASK_SOURCE_BODY_PATH,
    TICKS_PATH,
    DeliveryAccepted,
    SchedulesRequest,
    SchedulesResponse,
    SecretRequest,
    SourcePage,
    SourceQuery,
    SourceRan,
    TicksRequest,
    TicksResponse,
    WebhookSecret,
)
from tracelake.dispatcher.api.request import ApiRequest, read
from tracelake.dispatcher.steps.accept_delivery import (
    accept_delivery,
    read_body,
    show_secret,
)
from tracelake.dispatcher.steps.accept_ticks import accept_ticks, run_source, schedules
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.source_requests import answered
from tracelake.domain.dag.model import SourceKind
from tracelake.domain.errors import RateLimited
from tracelake.domain.webhooks import HEADERS
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity, header
from tracelake.serving.request import decode_body
from tracelake.serving.response import Response, json_response
from tracelake.store import sources
from tracelake.store.db import Transaction, database_now
from tracelake.store.users import User

SCHEDULES = Decoder(SchedulesRequest)
TICKS = Decoder(TicksRequest)
SECRET = Decoder(SecretRequest)
OCTETS = "application/octet-stream"
HOOKS_AT_ONCE = 256
"""Calls of webhooks that are read at a time: no more than this number of bodies is in memory, but for small ones
that came with their heads."""
HOOKS_OF_PEER = 64
HOOKS_OF_SOURCE = 128
HOOK_SECONDS = 10.0


@endpoint(
    "POST",
    SCHEDULES_PATH,
    Operation(identity=Identity.WORKER, body=SchedulesRequest, answers={200: SchedulesResponse}),
)
async def poll_schedules(request: ApiRequest) -> Response:
    """The schedules of all cron sources, for the one scheduler that acts; extends its lease."""
    return json_response(await schedules(request.services.ctx, await request.decode(SCHEDULES)))


@endpoint(
    "POST",
    TICKS_PATH,
    Operation(identity=Identity.WORKER, body=TicksRequest, answers={200: TicksResponse}),
)
async def send_ticks(request: ApiRequest) -> Response:
    """Send ticks that are due; each exists once, however often it is sent."""
    sent = await request.decode(TICKS)
    return json_response(TicksResponse(await accept_ticks(request.services.ctx, sent.ticks)))


SCHEDULER_ROUTES = (poll_schedules, send_ticks)


@endpoint(
    "GET", "/v1/sources", Operation(identity=Identity.USER, query=SourceQuery, answers={200: SourcePage})
)
async def list_sources(request: ApiRequest) -> Response:
    """The active sources: how each is activated, its last tick or delivery, and how many requests wait."""
    return json_response(await read(request, _page, request.user, request.query_as(SourceQuery)))


async def _page(tx: Transaction, user: User, query: SourceQuery) -> SourcePage:
    return await sources.page(tx, user.org_id, query.after or "", query.limit, await database_now(tx))


@endpoint(
    "POST",
    "/v1/sources/{dag}/{job}/run",
    Operation(identity=Identity.USER, answers={202: SourceRan}, refusals=(409,)),
)
async def run(request: ApiRequest) -> Response:
    """Make a tick of a cron source now."""
    dag, job = request.path_text("dag"), request.path_text("job")
    await request.refuse_body()
    return json_response(await run_source(request.services.ctx, dag, job, request.user.name), 202)


class TaskBodyQuery(Struct, frozen=True, forbid_unknown_fields=True):
    task_id: UUID


@endpoint(
    "GET",
    SOURCE_BODY_PATH,
    Operation(identity=Identity.WORKER, query=TaskBodyQuery, answers={200: OCTETS}, refusals=(404,)),
)
async def source_body(request: ApiRequest) -> Response:
    """The body of the delivery that a task is for, as it came."""
    return await _body(request, request.query_as(TaskBodyQuery).task_id)


@endpoint(
    "GET",
    TASK_SOURCE_BODY_PATH,
    Operation(identity=Identity.TASK, answers={200: OCTETS}, refusals=(404,)),
)
async def own_source_body(request: ApiRequest) -> Response:
    """The body of the delivery that the calling attempt is for, as it came."""
    return await _body(request, request.claims.task_id)


async def _body(request: ApiRequest, task_id: UUID) -> Response:
    body, _ = await read_body(request.services.ctx, task_id)
    # Never as the type that the sender gave it: whatever reads it is to know that it isn't the platform's.
    return Response(body, media_type=OCTETS.encode(), headers=((b"x-content-type-options", b"nosniff"),))


BODY_ROUTES = (source_body, own_source_body)


class _Readers:
    """The calls of webhooks that are being read, whose bodies are in memory. Neither one peer nor the callers of
    one source can take all places."""

    def __init__(self) -> None:
        self._places: Counter[str | tuple[str, str] | None] = Counter()

    @contextmanager
    def place(self, ctx: StepContext, peer: str, source: tuple[str, str]) -> Iterator[None]:
        limits = {None: HOOKS_AT_ONCE, peer: HOOKS_OF_PEER, source: HOOKS_OF_SOURCE}
        if any(self._places[key] >= most for key, most in limits.items()):
            answered(ctx, SourceKind.WEBHOOK, "limited")
            raise RateLimited("TooManyCalls", "too many calls are being read at a time; try again")
        self._places.update(limits.keys())
        try:
            yield
        finally:
            self._places.subtract(limits.keys())
            # Or there would be an entry for every peer that ever called.
            self._places = +self._places


_readers = _Readers()


@endpoint(
    "POST",
    "/v1/hooks/{dag}/{job}",
    Operation(
        identity=Identity.NONE,
        body=(OCTETS, "application/json"),
        body_required=False,
        answers={200: DeliveryAccepted, 202: DeliveryAccepted},
        refusals=(401, 404, 429),
        seconds=HOOK_SECONDS,
    ),
)
async def hook(request: ApiRequest) -> Response:
    """Deliver to a webhook source, signed with its secret; 200 for a delivery that was accepted before."""
    dag, job = request.path_text("dag"), request.path_text("job")
    if request.is_here(MAX_INLINE_BODY):
        return await _delivered(request, dag, job)
    # Whether there is such a source or not: the answer to a call that stops after its head would show it.
    with _readers.place(request.services.ctx, request.peer, (dag, job)):
        return await _delivered(request, dag, job)


async def _delivered(request: ApiRequest, dag: str, job: str) -> Response:
    body = await request.read(MAX_HOOK_BYTES)
    headers = {name: value for name in HEADERS if (value := header(request.scope, name.encode()))}
    done = await accept_delivery(request.services.ctx, dag, job, headers, body)
    return json_response(done, 200 if done.known else 202)


@endpoint(
    "POST",
    "/v1/sources/{dag}/{job}/secret",
    Operation(
        identity=Identity.USER,
        body=SecretRequest,
        body_required=False,
        answers={200: WebhookSecret},
        refusals=(409,),
    ),
)
async def secret(request: ApiRequest) -> Response:
    """The secret of a webhook, once; with `rotate` a new one, beside which those before hold for a while."""
    dag, job = request.path_text("dag"), request.path_text("job")
    asked = decode_body(SECRET, await request.read() or b"{}")
    return json_response(await show_secret(request.services.ctx, dag, job, asked, request.user.name))


SOURCE_VIEWS = (list_sources, run, secret, hook)
