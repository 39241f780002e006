"""Both ports of a Dispatcher over given steps, with clients that hold a credential of each kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import httpx
from prometheus_client import CollectorRegistry

from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse, CompleteRequest, CompleteResponse
from tracelake.dispatcher.api.apps import internal_app, user_app
from tracelake.dispatcher.api.query_proxy import QueryService
from tracelake.dispatcher.dispatch import Dispatch
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import TracelakeError
from tracelake.serving.surface import HttpMetrics, Surface
from tracelake.store import users
from tracelake.store.db import Transaction
from tracelake.tokens.jose import PublicKeys
from tracelake.tokens.opaque_tokens import WorkerTokens, new_user_token
from tracelake.tokens.signing import PemKeyring

WORKER_TOKEN = "tlw_" + "w" * 40
OLD_WORKER_TOKEN = "tlw_" + "o" * 40


class DirectDispatch:
    """Each call is a transaction of its own."""

    def __init__(self, ctx: StepContext) -> None:
        self.ctx = ctx

    async def claim(self, request: ClaimRequest) -> ClaimResponse:
        return (await claim_tasks(self.ctx, [request]))[0]

    async def claim_many(self, requests: Sequence[ClaimRequest]) -> list[ClaimResponse]:
        return await claim_tasks(self.ctx, requests)

    async def complete(self, request: CompleteRequest) -> CompleteResponse:
        answer = (await complete_tasks(self.ctx, [request]))[0]
        if isinstance(answer, TracelakeError):
            raise answer
        return answer

    async def complete_many(
        self, requests: Sequence[CompleteRequest]
    ) -> list[CompleteResponse | TracelakeError]:
        return await complete_tasks(self.ctx, requests)


@dataclass(frozen=True, slots=True)
class Surfaces:
    """``internal`` and ``user`` present no credential, ``worker`` and ``person`` present theirs."""

    internal_app: Surface
    user_app: Surface
    internal: httpx.AsyncClient
    worker: httpx.AsyncClient
    user: httpx.AsyncClient
    person: httpx.AsyncClient
    user_token: str = field(repr=False)

    def task(self, capability_token: str) -> dict[str, str]:
        return {"X-Trace-Task-Capability": capability_token}


@asynccontextmanager
async def open_surfaces(
    ctx: StepContext,
    *,
    dispatch: Dispatch | None = None,
    timeout: float = 30.0,
    token_ttl: float = 3.0,
    query_url: str | None = None,
    **more: Any,
) -> AsyncIterator[Surfaces]:
    metrics = HttpMetrics(CollectorRegistry())
    dispatch = dispatch or DirectDispatch(ctx)
    internal = internal_app(
        dispatch,
        worker_tokens=WorkerTokens(tokens=[WORKER_TOKEN, OLD_WORKER_TOKEN]),
        public_keys=_public_keys(ctx),
        metrics=metrics,
        timeout=timeout,
        **more,
    )
    query = QueryService(query_url)
    user = user_app(dispatch, metrics=metrics, timeout=timeout, token_ttl=token_ttl, query=query, **more)
    token = await ctx.db.run(_make_user)
    async with (
        _client(internal) as unauthenticated,
        _client(internal, {"X-Trace-Worker-Token": WORKER_TOKEN}) as worker,
        _client(user) as anonymous,
        _client(user, {"Authorization": f"Bearer {token}"}) as person,
    ):
        yield Surfaces(internal, user, unauthenticated, worker, anonymous, person, token)
    await query.close()


def _client(app: Surface, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://dispatcher", headers=headers)


def _public_keys(ctx: StepContext) -> Any:
    def keys(now: datetime) -> PublicKeys:
        assert isinstance(ctx.signer, PemKeyring)
        return ctx.signer.public_keys(now)

    return keys


async def _make_user(tx: Transaction) -> str:
    org_id = await users.ensure_org(tx)
    user_id = await users.ensure_user(tx, org_id, "tester")
    return await create_token(tx, user_id, "tests")


async def create_token(tx: Transaction, user_id: UUID, label: str) -> str:
    token, _ = new_user_token()
    await users.keep_token(tx, user_id, token, label)
    return token
