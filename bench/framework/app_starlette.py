"""Starlette with msgspec by hand: no OpenAPI, no injection; the most that a framework could reach."""

from __future__ import annotations

from hmac import compare_digest

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.framework.lookup import Lookup
from bench.framework.shapes import TOKEN, ClaimRequest, claimed

lookup = Lookup()
decoder = msgspec.json.Decoder(ClaimRequest)
encoder = msgspec.json.Encoder()


async def claim(request: Request) -> Response:
    if not compare_digest(request.headers.get("x-trace-worker-token", ""), TOKEN):
        return Response(status_code=401)
    try:
        data = decoder.decode(await request.body())
    except msgspec.ValidationError as error:
        return Response(str(error), status_code=400)
    body = encoder.encode(claimed(*await lookup.find(data.task_id)))
    return Response(body, media_type="application/json")


app = Starlette(routes=[Route("/internal/task-claim", claim, methods=["POST"])])
