"""Litestar: msgspec models in and out, the worker header checked by a guard.

The guard is a coroutine: Litestar runs a plain function in a thread, which costs each request two switches.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import Any

from litestar import Litestar, post
from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler

from bench.framework.lookup import Lookup
from bench.framework.shapes import TOKEN, Claimed, ClaimRequest, claimed

lookup = Lookup()


async def known_worker(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    if not compare_digest(connection.headers.get("x-trace-worker-token", ""), TOKEN):
        raise NotAuthorizedException


@post("/internal/task-claim", guards=[known_worker], status_code=200)
async def claim(data: ClaimRequest) -> Claimed:
    return claimed(*await lookup.find(data.task_id))


app = Litestar([claim])
