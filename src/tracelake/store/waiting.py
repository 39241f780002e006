"""Why queued tasks wait, in one query for any number of them, and the workers that could take them.

A worker's registration decides nothing. It is for people: a task that waits for a runtime without workers says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import msgspec

from tracelake.contracts.bundles import FORGET_SECONDS
from tracelake.contracts.dispatcher_api import WORKER_GONE_SECONDS, WorkerRegistration
from tracelake.contracts.user_api import WaitingFor
from tracelake.domain.waiting import QueuedFacts, why_waiting
from tracelake.postgres import sqlfiles
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "waiting.sql")


@dataclass(frozen=True, slots=True)
class ServedRuntime:
    """``held`` tasks run there; a worker that never registered has no known ``slots``."""

    runtime: str
    workers: int
    slots: int
    held: int


async def register_worker(tx: Transaction, registration: WorkerRegistration) -> bool:
    """Returns whether it is new."""
    if registration.leaving:
        await tx.execute(SQL.unregister_worker, registration.worker_id)
        return False
    row = await tx.fetchrow(
        SQL.register_worker, registration.worker_id, registration.runtime, registration.slots
    )
    assert row is not None
    if row["came"]:
        await tx.execute(SQL.forget_silent_workers)
    return bool(row["came"])


async def served_runtimes(tx: Transaction) -> dict[str, ServedRuntime]:
    rows = await tx.fetch(SQL.runtimes_served, WORKER_GONE_SECONDS, FORGET_SECONDS)
    return {row["runtime"]: msgspec.convert(dict(row), ServedRuntime) for row in rows}


async def waiting_for(tx: Transaction, task_ids: Sequence[UUID]) -> dict[UUID, WaitingFor]:
    """Of those that are queued."""
    if not task_ids:
        return {}
    served = await served_runtimes(tx)
    found = {}
    for row in await tx.fetch(SQL.waiting_facts, list(task_ids)):
        runtime = served.get(row["runtime"])
        own = (
            {}
            if runtime is None
            else {"workers": runtime.workers, "slots": runtime.slots, "held": runtime.held}
        )
        why = why_waiting(msgspec.convert({**row, **own}, QueuedFacts))
        found[row["task_id"]] = WaitingFor(why.cause.value, why.message, why.until, why.since)
    return found
