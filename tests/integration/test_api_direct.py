"""Paths that are answered without the framework are answered as the framework would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tracelake.dispatcher.steps.context import StepContext
from tracelake.serving.edge import Surface
from tracelake.serving.openapi import declared
from tracelake.testing.surfaces import Surfaces, open_surfaces

ID = "7e0c9a52-93d5-4a53-8d0e-0d0c6c6f5f11"
BODIES = [
    b"",
    b"{}",
    b"\xff",
    b'{"task_id": "%s", "worker_id": "w"}' % ID.encode(),
    b'{"task_id": "%s", "attempt": 1, "lease_token": "%s"}' % (ID.encode(), ID.encode()),
    b'{"task_id": "%s", "attempt": 1, "status": "Failed"}' % ID.encode(),
    b"name: x\njobs: []\n",
    b"x" * (1024 * 1024 + 1),
]
QUERIES = ["", "?limit=2", "?limit=x", f"?task_id={ID}"]


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


def framework(surface: Surface, headers: httpx.Headers) -> httpx.AsyncClient:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {"services": surface.services}
        await surface.litestar(scope, receive, send)

    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://dispatcher", headers=headers)


async def test_both_ways_of_answering_agree(api: Surfaces) -> None:
    pairs = [
        (api.internal_app, api.internal),
        (api.internal_app, api.worker),
        (api.user_app, api.user),
        (api.user_app, api.person),
    ]
    seen = set()
    for surface, direct in pairs:
        async with framework(surface, direct.headers) as slow:
            for path, method, _, _ in declared(surface.litestar.routes):
                if "{" in path or path == "/metrics":
                    continue
                for query in QUERIES:
                    for body in BODIES if method == "POST" else BODIES[:1]:
                        fast = await direct.request(method, path + query, content=body)
                        same = await slow.request(method, path + query, content=body)
                        assert (fast.status_code, fast.text) == (same.status_code, same.text), path
                        assert sorted(fast.headers.items()) == sorted(same.headers.items()), path
                        seen.add(fast.status_code)
    assert {200, 400, 401, 404, 413, 422} <= seen
