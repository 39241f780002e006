"""The route of backpressure on the user port."""

from __future__ import annotations

from tracelake.contracts.pressure import PressureReport
from tracelake.dispatcher.api.request import ApiRequest, read
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.response import Response, json_response
from tracelake.store import pressure


@endpoint("GET", "/v1/pressure", Operation(identity=Identity.USER, answers={200: PressureReport}))
async def show_pressure(request: ApiRequest) -> Response:
    """Jobs with thresholds and what waits in them, the jobs that are held for them, running tasks per operator."""
    ctx = request.services.ctx
    return json_response(await read(request, pressure.report, ctx.pressure))


PRESSURE_VIEWS = (show_pressure,)
