"""Routes of deliveries: the sending process's calls on the internal port, views and interventions for people."""

from __future__ import annotations

from msgspec.json import Decoder

from tracelake.contracts.deliveries import (
    LOAD_PATH,
    MAX_PLAN_BYTES,
    PLAN_PATH,
    REPORT_PATH,
    DeliveryDetail,
    DeliveryLoad,
    DeliveryLoaded,
    DeliveryPage,
    DeliveryPaused,
    DeliveryPlan,
    DeliveryPlanned,
    DeliveryQuery,
    DeliveryReport,
    DeliveryReported,
    DropMessages,
    MessagesDropped,
    MessagesReplayed,
    ReplayMessages,
)
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.dispatcher.steps import deliveries
from tracelake.domain.errors import Invalid
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.request import decode_body
from tracelake.serving.response import Response, json_response

LOAD = Decoder(DeliveryLoad)
PLAN = Decoder(DeliveryPlan)
REPORT = Decoder(DeliveryReport)
REPLAY = Decoder(ReplayMessages)
DROP = Decoder(DropMessages)
_FENCED = (403, 404, 409)


@endpoint(
    "POST",
    LOAD_PATH,
    Operation(identity=Identity.WORKER, body=DeliveryLoad, answers={200: DeliveryLoaded}, refusals=_FENCED),
)
async def load(request: ApiRequest) -> Response:
    """The messages that a delivery's process doesn't have yet, and where it goes on."""
    return json_response(await deliveries.load_delivery(request.services.ctx, await request.decode(LOAD)))


@endpoint(
    "POST",
    PLAN_PATH,
    Operation(identity=Identity.WORKER, body=DeliveryPlan, answers={200: DeliveryPlanned}, refusals=_FENCED),
)
async def plan(request: ApiRequest) -> Response:
    """Make messages of rows, and retractions of rows that are gone; exactly once per position."""
    asked = await request.decode(PLAN, MAX_PLAN_BYTES)
    return json_response(await deliveries.plan_delivery(request.services.ctx, asked))


@endpoint(
    "POST",
    REPORT_PATH,
    Operation(
        identity=Identity.WORKER, body=DeliveryReport, answers={200: DeliveryReported}, refusals=_FENCED
    ),
)
async def report(request: ApiRequest) -> Response:
    """Record how tries ended, and that others begin."""
    return json_response(await deliveries.report_delivery(request.services.ctx, await request.decode(REPORT)))


DELIVERY_ROUTES = (load, plan, report)
_INTERVENTION = Operation(identity=Identity.USER, answers={200: DeliveryPaused}, refusals=(409,))


@endpoint("GET", "/v1/deliveries", Operation(identity=Identity.USER, answers={200: DeliveryPage}))
async def list_deliveries(request: ApiRequest) -> Response:
    """Every delivery, with what it has sent and what waits."""
    return json_response(DeliveryPage(await deliveries.view_deliveries(request.services.ctx)))


@endpoint(
    "GET",
    "/v1/deliveries/{dag}/{name}",
    Operation(identity=Identity.USER, query=DeliveryQuery, answers={200: DeliveryDetail}),
)
async def show_delivery(request: ApiRequest) -> Response:
    """One delivery with its newest messages."""
    query = request.query_as(DeliveryQuery)
    dag, name = request.path_text("dag"), request.path_text("name")
    found = await deliveries.view_delivery(request.services.ctx, dag, name, query.state or None, query.limit)
    return json_response(found)


@endpoint("POST", "/v1/deliveries/{dag}/{name}/pause", _INTERVENTION)
async def pause_delivery(request: ApiRequest) -> Response:
    """Send nothing until it is resumed; rows wait."""
    await request.refuse_body()
    dag, name = request.path_text("dag"), request.path_text("name")
    held = await deliveries.pause_delivery(request.services.ctx, dag, name, request.user.name)
    return json_response(DeliveryPaused(held))


@endpoint("POST", "/v1/deliveries/{dag}/{name}/resume", _INTERVENTION)
async def resume_delivery(request: ApiRequest) -> Response:
    """Go on after a pause, or after the receiver answered that it wants no more."""
    await request.refuse_body()
    dag, name = request.path_text("dag"), request.path_text("name")
    held = await deliveries.resume_delivery(request.services.ctx, dag, name, request.user.name)
    return json_response(DeliveryPaused(held))


@endpoint(
    "POST",
    "/v1/deliveries/{dag}/{name}/replay",
    Operation(
        identity=Identity.USER,
        body=ReplayMessages,
        body_required=False,
        answers={200: MessagesReplayed},
        refusals=(409,),
    ),
)
async def replay_delivery(request: ApiRequest) -> Response:
    """Send dead letters again, some or without a body all; one whose record has a newer message is only listed."""
    asked = decode_body(REPLAY, await request.read() or b"{}")
    dag, name = request.path_text("dag"), request.path_text("name")
    done = await deliveries.replay_messages(
        request.services.ctx, dag, name, asked.message_ids, request.user.name
    )
    return json_response(done)


@endpoint(
    "POST",
    "/v1/deliveries/{dag}/{name}/drop",
    Operation(identity=Identity.USER, body=DropMessages, answers={200: MessagesDropped}),
)
async def drop_messages(request: ApiRequest) -> Response:
    """Give up dead letters for good: some of them, or all. They are kept as dropped until they are collected."""
    asked = await request.decode(DROP)
    if (asked.message_ids is None) == (not asked.all):
        raise Invalid("NothingNamed", "give either 'message_ids' or 'all': true")
    dag, name = request.path_text("dag"), request.path_text("name")
    return json_response(
        await deliveries.drop_messages(request.services.ctx, dag, name, asked.message_ids, request.user.name)
    )


DELIVERY_VIEWS = (
    list_deliveries,
    show_delivery,
    pause_delivery,
    resume_delivery,
    replay_delivery,
    drop_messages,
)
