"""The ``dispatcher`` runtime: platform operators, run in this process as ordinary leased tasks.

They are claimed, fenced and completed like any other; only the worker is here. An answer that an outage of
the database swallowed is asked for again, as any worker would: a lost one must not cost a lease period. What dies
with the process is found again by the re-wake sweep or the reaper. They obey ``timeout_seconds`` as everybody does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from typing import TypeVar
from uuid import UUID

import structlog

from tracelake.contracts.dispatcher_api import (
    MAX_EVENTS,
    ClaimRequest,
    ClaimResponse,
    CompleteRequest,
    EventIn,
    EventsRequest,
    HeartbeatRequest,
    TaskPayload,
)
from tracelake.dispatcher.api.dispatch import Dispatch
from tracelake.dispatcher.loops.until_answered import until_answered
from tracelake.dispatcher.steps.accept_events import accept_events
from tracelake.dispatcher.steps.heartbeat import heartbeat
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.operators import noop, range_aggregator, range_splitter
from tracelake.store import datasets
from tracelake.store.db import DeployLock

log = structlog.get_logger(__name__)

CONCURRENCY = 8
TIMED_OUT = "timed out: it ran longer than its timeout_seconds, {} s"

T = TypeVar("T")


class InProcessRuntime:
    def __init__(self, dispatch: Dispatch, worker_id: str) -> None:
        self._dispatch = dispatch
        self._worker_id = worker_id
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._running: set[asyncio.Task[None]] = set()
        self._draining = False

    def submit(self, task_id: UUID) -> None:
        task = asyncio.create_task(self._run(task_id))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self, seconds: float) -> None:
        """Begin nothing more and wait that long for what runs: its work is short. The rest is given up."""
        self._draining = True
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=seconds)
            for task in late:
                task.cancel()

    async def _run(self, task_id: UUID) -> None:
        async with self._slots:
            if self._draining:
                return
            try:
                request = ClaimRequest(task_id, self._worker_id, secrets.token_hex(8))
                claimed = await self._until_answered(lambda: self._dispatch.claim(request))
                if claimed.status == "Claimed":
                    await self._execute(claimed)
            except (Unavailable, Conflict) as error:
                log.warning("in-process task given up", task_id=str(task_id), reason=error.reason)
            except Exception:
                log.exception("in-process task crashed", task_id=str(task_id))

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        return await until_answered(call, stopping=lambda: self._draining)

    async def _execute(self, claimed: ClaimResponse) -> None:
        task, attempt, lease = claimed.task, claimed.attempt, claimed.lease_token
        assert task is not None
        assert attempt is not None
        assert lease is not None
        bound = log.bind(
            task_id=str(task.task_id), attempt=attempt, job=f"{task.job.dag_name}/{task.job.name}"
        )
        try:
            async with asyncio.timeout(task.timeout_seconds):
                final = await self._emit_all_but_the_last(task, attempt, lease)
        except (Invalid, TimeoutError) as error:
            message = error.message if isinstance(error, Invalid) else TIMED_OUT.format(task.timeout_seconds)
            bound.warning("in-process task failed", error=message)
            failed = CompleteRequest(
                task.task_id,
                "Failed",
                attempt,
                lease,
                error_message=message,
                retryable=isinstance(error, TimeoutError),
            )
            await self._until_answered(lambda: self._dispatch.complete(failed))
            return
        done = CompleteRequest(task.task_id, "Completed", attempt, lease, events=final)
        await self._until_answered(lambda: self._dispatch.complete(done))
        bound.info("in-process task completed")

    async def _emit_all_but_the_last(self, task: TaskPayload, attempt: int, lease: UUID) -> list[EventIn]:
        """The last events come with the completion."""
        events = await self._events(task)
        final = list(islice(events, MAX_EVENTS))
        while len(final) == MAX_EVENTS:
            beat = HeartbeatRequest(task.task_id, attempt, lease)
            await heartbeat(self._dispatch.ctx, beat)
            request = EventsRequest(task.task_id, attempt, final, lease)
            await accept_events(self._dispatch.ctx, request)
            final = list(islice(events, MAX_EVENTS))
        return final

    async def _events(self, task: TaskPayload) -> Iterator[EventIn]:
        match task.operator:
            case "noop":
                return noop.run(task)
            case "range_splitter":
                return range_splitter.run(task, self._dispatch.ctx.emissions.max_events)
            case "range_aggregator":
                version = task.outputs[0].dataset_version
                announced = await self._dispatch.ctx.db.run(
                    lambda tx: datasets.last_announced(tx, version), lock=DeployLock.NONE
                )
                return range_aggregator.run(task, announced, self._dispatch.ctx.emissions.max_events)
            case other:
                raise Invalid("UnknownOperator", f"the dispatcher runtime has no operator {other!r}")
