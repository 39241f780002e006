"""Litestar whose handler takes the raw body and returns bytes: what a hot route may do without leaving it."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Litestar, MediaType, Request, Response, post
from litestar.exceptions import ValidationException

from bench.framework.app_litestar import known_worker
from bench.framework.lookup import Lookup
from bench.framework.shapes import ClaimRequest, claimed

lookup = Lookup()
decoder = msgspec.json.Decoder(ClaimRequest)
encoder = msgspec.json.Encoder()


@post("/internal/task-claim", guards=[known_worker], status_code=200)
async def claim(request: Request[Any, Any, Any]) -> Response[bytes]:
    try:
        data = decoder.decode(await request.body())
    except msgspec.ValidationError as error:
        raise ValidationException(str(error)) from error
    body = encoder.encode(claimed(*await lookup.find(data.task_id)))
    return Response(body, media_type=MediaType.JSON)


app = Litestar([claim])
