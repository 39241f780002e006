"""An invoker says where it is; one that has just come makes what waited for it due at once."""

from __future__ import annotations

import structlog

from tracelake.contracts.bundles import InvokerRegistration
from tracelake.dispatcher.runtimes import LAMBDA
from tracelake.dispatcher.steps.context import StepContext
from tracelake.store import invokers, outbox
from tracelake.store.db import DeployLock, Transaction

log = structlog.get_logger(__name__)


async def register_invoker(ctx: StepContext, said: InvokerRegistration) -> None:
    async def work(tx: Transaction) -> bool:
        came = await invokers.register(tx, said)
        if came:
            await outbox.deliver_held_now(tx, LAMBDA)
        return came

    came = await ctx.db.run(work, lock=DeployLock.NONE, durable=False)
    if came:
        log.info("invoker came", url=said.url, concurrency=said.concurrency)
    elif said.concurrency == 0:
        log.info("invoker left", url=said.url)
