"""Reads for people: a transaction of their own that takes no part in deploys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar

from tracelake.dispatcher.api.request import ApiRequest
from tracelake.store.db import DeployLock, Transaction

P = ParamSpec("P")
T = TypeVar("T")


async def read(
    request: ApiRequest,
    look: Callable[Concatenate[Transaction, P], Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    async def work(tx: Transaction) -> T:
        return await look(tx, *args, **kwargs)

    return await request.services.ctx.db.run(work, lock=DeployLock.NONE)
