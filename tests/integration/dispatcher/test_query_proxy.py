"""The user port passes queries on: the same credential, the same answer, and nothing that outlives its caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.support.query_port import served
from tests.support.surfaces import DirectDispatch, create_token
from tracelake.contracts.query_api import ARROW_STREAM
from tracelake.dispatcher.api.apps import user_app
from tracelake.dispatcher.api.query_proxy import QueryService
from tracelake.dispatcher.steps.context import StepContext
from tracelake.serving.surface import HttpMetrics
from tracelake.store import users
from tracelake.store.db import Transaction

BODY = {"sql": "SELECT 1", "params": [1], "limit": 5}


class Upstream:
    """Stands where the Query Service would: keeps what it was asked and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[bytes, bytes], bytes]] = []
        self.status = 200
        self.headers = [
            (b"content-type", ARROW_STREAM.encode()),
            (b"x-trace-row-count", b"3"),
            (b"server", b"x"),
        ]
        self.pieces = [b"one", b"two", b"three"]
        self.hold = False
        self.holding = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        self.asked.append((dict(scope["headers"]), body))
        if self.hold:
            self.holding.set()
            while (await receive())["type"] != "http.disconnect":
                continue
            self.left.set()
            return
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def user_port(ctx: StepContext, url: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """A real user port with a person at it."""

    async def make_user(tx: Transaction) -> str:
        user_id = await users.ensure_user(tx, await users.ensure_org(tx), "tester")
        return await create_token(tx, user_id, "tests")

    token = await ctx.db.run(make_user)
    query = QueryService(url)
    app = user_app(DirectDispatch(ctx), metrics=HttpMetrics(CollectorRegistry()), query=query)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        served(app) as here,
        httpx.AsyncClient(base_url=here, headers=headers, trust_env=False) as person,
    ):
        yield person
    await query.close()


async def test_body_and_headers_go_there_and_the_answer_comes_back_as_it_is(ctx: StepContext) -> None:
    upstream = Upstream()
    async with served(upstream) as url, user_port(ctx, url) as person:
        answer = await person.post("/v1/query", json=BODY, headers={"Accept": ARROW_STREAM, "Cookie": "a=b"})
        assert (answer.status_code, answer.content) == (200, b"onetwothree")
        assert (answer.headers["content-type"], answer.headers["x-trace-row-count"]) == (ARROW_STREAM, "3")
        assert "server" not in answer.headers
        [(headers, body)] = upstream.asked
        assert body == answer.request.content
        assert headers[b"authorization"].decode() == person.headers["authorization"]
        assert headers[b"accept"] == ARROW_STREAM.encode()
        assert b"cookie" not in headers
        upstream.status, upstream.pieces = 422, [b'{"reason":"InvalidQuery"}']
        upstream.headers = [(b"content-type", b"application/problem+json")]
        refused = await person.post("/v1/query", json=BODY)
        assert (refused.status_code, refused.json()) == (422, {"reason": "InvalidQuery"})


async def test_an_exported_file_is_fetched_by_the_same_credential(ctx: StepContext) -> None:
    upstream = Upstream()
    async with served(upstream) as url, user_port(ctx, url) as person:
        answer = await person.get(f"/v1/exports?query_id={UUID(int=7)}")
        assert (answer.status_code, answer.content) == (200, b"onetwothree")
        [(headers, body)] = upstream.asked
        assert (headers[b"authorization"].decode(), body) == (person.headers["authorization"], b"")
        for query in ("", "?query_id=../x", f"?query_id={UUID(int=7)}&more=1"):
            assert (await person.get(f"/v1/exports{query}")).status_code in (400, 422), query
        assert len(upstream.asked) == 1


async def test_strangers_and_malformed_requests_are_refused_here(ctx: StepContext) -> None:
    upstream = Upstream()
    async with served(upstream) as url, user_port(ctx, url) as person:
        stranger = await person.post("/v1/query", json=BODY, headers={"Authorization": "Bearer tlu_nobody"})
        assert (stranger.status_code, stranger.json()["reason"]) == (401, "UserTokenInvalid")
        for content, status in (
            (b"{", 400),
            (b"{}", 422),
            (b'{"sql":"SELECT 1","x":1}', 422),
            (b"x" * 3_000_000, 413),
        ):
            assert (await person.post("/v1/query", content=content)).status_code == status
        assert upstream.asked == []


@pytest.mark.parametrize(
    ("url", "reason"), [(None, "NoQueryService"), ("http://127.0.0.1:9", "QueryServiceUnavailable")]
)
async def test_without_a_query_service_the_user_learns_what_to_do(
    ctx: StepContext, url: str | None, reason: str
) -> None:
    async with user_port(ctx, url) as person:
        answer = await person.post("/v1/query", json=BODY)
        assert (answer.status_code, answer.json()["reason"]) == (503, reason)
        assert "Query Service" in answer.json()["detail"]
        assert (await person.get("/v1/tasks")).status_code == 200


async def test_a_client_that_goes_away_ends_the_query_there(ctx: StepContext) -> None:
    upstream = Upstream()
    upstream.hold = True
    async with served(upstream) as url, user_port(ctx, url) as person:
        asking = asyncio.create_task(person.post("/v1/query", json=BODY))
        async with asyncio.timeout(20):
            await upstream.holding.wait()
            asking.cancel()
            await asyncio.wait({asking})
            await upstream.left.wait()


async def test_an_answer_that_breaks_off_there_breaks_off_here(ctx: StepContext) -> None:
    upstream = Upstream()
    upstream.headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
    async with served(upstream) as url, user_port(ctx, url) as person:
        with pytest.raises(httpx.TransportError):
            await person.post("/v1/query", json=BODY)
        assert (await person.get("/v1/tasks")).status_code == 200
