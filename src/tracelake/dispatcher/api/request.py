"""Requests as the Dispatcher's routes read them: with its services and its kinds of callers.

``read`` runs a query for people in a transaction of its own that takes no part in deploys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from tracelake.contracts.token_claims import TokenClaims
from tracelake.dispatcher.dispatch import Dispatch
from tracelake.dispatcher.steps.context import StepContext
from tracelake.queue.base import Queue
from tracelake.serving.request import MIB, Services, SurfaceRequest
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.users import User

if TYPE_CHECKING:
    from tracelake.dispatcher.api.query_proxy import QueryService

COMPLETION_BODY = 16 * MIB
"""Maximum size of a completion: manifests list every file."""
P = ParamSpec("P")
T = TypeVar("T")


class ApiRequest(SurfaceRequest):
    @property
    def services(self) -> DispatcherServices:
        services: DispatcherServices = self.scope["state"]["services"]
        return services

    @property
    def user(self) -> User:
        user: User = self.caller
        return user

    @property
    def claims(self) -> TokenClaims:
        claims: TokenClaims = self.caller
        return claims


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherServices(Services):
    dispatch: Dispatch
    query: QueryService
    queue: Queue | None = None
    """Only asked for its depths; routes publish nothing to it."""

    @property
    def ctx(self) -> StepContext:
        return self.dispatch.ctx


async def read(
    request: ApiRequest,
    look: Callable[Concatenate[Transaction, P], Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    async def work(tx: Transaction) -> T:
        return await look(tx, *args, **kwargs)

    return await request.services.ctx.db.run(work, lock=DeployLock.NONE)
