"""The ``dispatcher`` runtime: runs platform operators in this process, as ordinary leased tasks.

They are claimed, fenced and completed like any other task; only the worker is here. A call whose answer was lost in
an outage of the database is repeated, as any worker would: a lost answer must not cost a lease period. Tasks that
die with the process are found again by the re-wake sweep or the reaper. ``timeout_seconds`` holds for them too.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import Iterator
from itertools import islice
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
from tracelake.dispatcher.dispatch import Dispatch, OwnCompletions, until_database_answers
from tracelake.dispatcher.steps.accept_events import accept_events
from tracelake.dispatcher.steps.running_attempt import heartbeat
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.domain.operators.in_process import NOOP_SPEC, RANGE_AGGREGATOR, RANGE_SPLITTER
from tracelake.domain.task import Fence
from tracelake.operators import in_process
from tracelake.store import datasets
from tracelake.store.db import DeployLock

log = structlog.get_logger(__name__)

CONCURRENCY = 8
TIMED_OUT = "timed out: it ran longer than its timeout_seconds, {} s"


class InProcessRuntime:
    def __init__(self, dispatch: Dispatch, worker_id: str) -> None:
        self._dispatch = dispatch
        self._worker_id = worker_id
        self._waiting: list[tuple[float, int, UUID]] = []
        self._submitted = 0
        self._running: set[asyncio.Task[None]] = set()
        self._draining = False
        self._completions = OwnCompletions(dispatch, self._is_draining)

    def _is_draining(self) -> bool:
        return self._draining

    def submit(self, task_id: UUID, behind: float = 0.0) -> None:
        """It waits behind others that are submitted up to ``behind`` seconds later."""
        turn = asyncio.get_running_loop().time() + behind
        self._submitted += 1
        heapq.heappush(self._waiting, (turn, self._submitted, task_id))
        self._start()

    def _start(self) -> None:
        """Run what waits, as far as there are slots. Tasks that wait are unclaimed, so after a stop the sweep of
        another replica wakes them again."""
        while self._waiting and len(self._running) < CONCURRENCY and not self._draining:
            task = asyncio.create_task(self._run(heapq.heappop(self._waiting)[2]))
            # The event loop keeps weak references to tasks only: without this one it could be collected half-way.
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()

    async def drain(self, seconds: float) -> None:
        """Start nothing more and wait that long for running tasks, whose work is short. The rest is given up."""
        self._draining = True
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=seconds)
            for task in late:
                task.cancel()

    async def _run(self, task_id: UUID) -> None:
        try:
            # The key lets a repeat of the claim find the lease whose answer was lost.
            request = ClaimRequest(task_id, self._worker_id, secrets.token_hex(8))
            claimed = await until_database_answers(
                lambda: self._dispatch.claim(request), stopping=self._is_draining
            )
            if claimed.status == "Claimed":
                await self._execute(claimed)
        # Nothing to end here: the lease runs out, or the task has moved on without this attempt.
        except (Unavailable, Conflict) as error:
            log.warning("in-process task given up", task_id=str(task_id), reason=error.reason)
        except Exception:
            log.exception("in-process task crashed", task_id=str(task_id))

    async def _execute(self, claimed: ClaimResponse) -> None:
        task, attempt, lease = claimed.task, claimed.attempt, claimed.lease_token
        assert task is not None
        assert attempt is not None
        assert lease is not None
        fence = Fence(task.task_id, attempt, lease)
        bound = log.bind(
            task_id=str(task.task_id), attempt=attempt, job=f"{task.job.dag_name}/{task.job.name}"
        )
        try:
            async with asyncio.timeout(task.timeout_seconds):
                final = await self._emit_all_but_the_last(task, fence)
        except (Invalid, TimeoutError) as error:
            message = error.message if isinstance(error, Invalid) else TIMED_OUT.format(task.timeout_seconds)
            bound.warning("in-process task failed", error=message)
            # The same input is invalid again; a timeout may have been a slow database's.
            retryable = isinstance(error, TimeoutError)
            await self._completions.report(
                CompleteRequest.of(fence, "Failed", message, retryable=retryable), bound
            )
            return
        report = await self._completions.report(
            CompleteRequest.of(fence, "Completed", events=final),
            bound,
            as_failure=lambda why: CompleteRequest.of(fence, "Failed", why, retryable=False),
        )
        if report.is_accepted and report.completion.status == "Completed":
            bound.info("in-process task completed")

    async def _emit_all_but_the_last(self, task: TaskPayload, fence: Fence) -> list[EventIn]:
        """Send all events but the last ones, which are returned: they go with the completion."""
        events = await self._events(task)
        final = list(islice(events, MAX_EVENTS))
        # A full portion may be the last one. Then an empty list goes with the completion, which is harmless.
        while len(final) == MAX_EVENTS:
            beat = HeartbeatRequest(fence.task_id, fence.attempt, fence.lease_token)
            # A range of many portions may take longer than a lease, and nothing else here extends it.
            await heartbeat(self._dispatch.ctx, beat)
            request = EventsRequest(fence.task_id, fence.attempt, final, fence.lease_token)
            await accept_events(self._dispatch.ctx, request)
            final = list(islice(events, MAX_EVENTS))
        return final

    async def _events(self, task: TaskPayload) -> Iterator[EventIn]:
        match task.operator:
            case NOOP_SPEC.name:
                return in_process.announce_scope(task)
            case RANGE_SPLITTER.name:
                version, cells = task.outputs[0].dataset_version, in_process.cells_cut(task)
                chunks = await self._dispatch.ctx.db.run(
                    lambda tx: datasets.announced_within(tx, version, cells), lock=DeployLock.NONE
                )
                return in_process.split_range(task, self._dispatch.ctx.emissions.max_events, announced=chunks)
            case RANGE_AGGREGATOR.name:
                version = task.outputs[0].dataset_version
                announced = await self._dispatch.ctx.db.run(
                    lambda tx: datasets.last_announced(tx, version), lock=DeployLock.NONE
                )
                return in_process.aggregate_ranges(task, announced, self._dispatch.ctx.emissions.max_events)
            case other:
                raise Invalid("UnknownOperator", f"the dispatcher runtime has no operator {other!r}")
