"""FastAPI whose handler takes the raw body and returns bytes: the counterpart of ``app_litestar_bytes``."""

from __future__ import annotations

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response

from bench.framework.app_fastapi import known_worker
from bench.framework.lookup import Lookup
from bench.framework.shapes import ClaimRequest, claimed

lookup = Lookup()
decoder = msgspec.json.Decoder(ClaimRequest)
encoder = msgspec.json.Encoder()
app = FastAPI()


@app.post("/internal/task-claim", dependencies=[Depends(known_worker)])
async def claim(request: Request) -> Response:
    try:
        data = decoder.decode(await request.body())
    except msgspec.ValidationError as error:
        raise HTTPException(422, str(error)) from error
    body = encoder.encode(claimed(*await lookup.find(data.task_id)))
    return Response(body, media_type="application/json")
