"""``registered``: a lease holder registers with the Dispatcher for its runtime, for as long as it runs.

Nothing depends on it but what people see: which runtimes have workers, and whether a waiting task could be taken.
So a Dispatcher that is away, or that is of an older release and knows no registrations, keeps no worker from its
work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from tracelake.contracts.dispatcher_api import WORKER_SEEN_SECONDS, WorkerRegistration
from tracelake.domain.errors import TracelakeError
from tracelake.leases.dispatcher_client import DispatcherClient

_FAREWELL_SECONDS = 0.5

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def registered(client: DispatcherClient, registration: WorkerRegistration) -> AsyncIterator[None]:
    keeping = asyncio.create_task(_keep(client, registration))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        # If that fails, it is forgotten a little later.
        with suppress(TracelakeError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await client.register_worker(
                    WorkerRegistration(
                        registration.worker_id, registration.runtime, registration.slots, leaving=True
                    )
                )


async def _keep(client: DispatcherClient, registration: WorkerRegistration) -> None:
    refused = False
    while True:
        try:
            await client.register_worker(registration)
            refused = False
        except TracelakeError as error:
            if not refused:
                _log.warning("not_registered", error=error.message)
            refused = True
        await asyncio.sleep(WORKER_SEEN_SECONDS)
