"""Step 3, outbox to queue: wake-ups that were committed are delivered, at least once.

What this process has just committed is delivered straight from memory; a sweep takes what is due later, what
other processes left behind, and what failed. A wake-up that can't be published is tried again with backoff
and given up visibly after many tries; the task behind it is still found by the re-wake sweep.

What was delivered is forgotten a moment later, many entries at a time: no task waits for that, and entries
that a crash leaves behind are delivered once more, which is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from uuid import UUID

import structlog
from prometheus_client import CollectorRegistry, Counter

from tracelake.dispatcher.runtimes import Execution, RuntimeRegistry
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.queue.base import Queue
from tracelake.store import outbox
from tracelake.store.db import Database, DeployLock
from tracelake.store.outbox_entry import OutboxEntry, OutboxKind

log = structlog.get_logger(__name__)

BATCH = 500
HOLD_SECONDS = 30.0
GRACE_SECONDS = 1.0
FORGET_SECONDS = 0.2
"""Well within the grace, after which a sweep takes what is still there."""
BACKOFF_BASE_SECONDS = 1.0
BACKOFF_MAX_SECONDS = 300.0
MAX_TRIES = 20


class OutboxDelivery:
    """``run_local`` takes tasks of in-process runtimes, ``invoke`` wake-ups of functions, which it says itself when
    they are done with; everything else goes to its runtime's queue."""

    def __init__(
        self,
        db: Database,
        queue: Queue,
        runtimes: RuntimeRegistry,
        run_local: Callable[[UUID], None],
        invoke: Callable[[Sequence[OutboxEntry], Callable[[Sequence[int]], None]], None],
        registry: CollectorRegistry,
    ) -> None:
        self._db = db
        self._queue = queue
        self._runtimes = runtimes
        self._run_local = run_local
        self._invoke = invoke
        self._fresh: list[OutboxEntry] = []
        self._wakened = asyncio.Event()
        self._settled: list[int] = []
        self._forget_at = 0.0
        self._delivered = Counter("tracelake_outbox_delivered_total", "Delivered.", registry=registry)
        self._failed = Counter("tracelake_outbox_failed_total", "Failed deliveries.", registry=registry)
        db.on_commit(self.notice)

    def notice(self, entries: Sequence[OutboxEntry]) -> None:
        """Hear of entries that were just committed here; messages of buffers have their own delivery."""
        self._fresh.extend(entry for entry in entries if entry.due and entry.kind is OutboxKind.WAKE)
        self._wakened.set()

    async def deliver_fresh(self) -> None:
        """For ever: deliver what was committed here as soon as it is."""
        while True:
            await self._pause()
            while self._fresh:
                batch, self._fresh = self._fresh[:BATCH], self._fresh[BATCH:]
                await self._tried(self.deliver(batch), len(batch))
            if len(self._settled) >= BATCH or self._forget_at <= asyncio.get_running_loop().time():
                await self._tried(self._forget(), len(self._settled))

    async def _pause(self) -> None:
        """Until something was committed here, or what was delivered is to be forgotten."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._forget_at if self._settled else None):
                await self._wakened.wait()
        self._wakened.clear()

    async def _tried(self, work: Awaitable[None], count: int) -> None:
        try:
            await work
        except Unavailable as error:
            log.warning("outbox entries wait for the sweep", count=count, error=error.message)
        except Exception:
            log.exception("loop failed", loop="fresh outbox entries", count=count)

    async def sweep(self) -> None:
        """Once: deliver everything that is due and that nobody else is delivering."""
        while True:
            entries = await self._db.run(
                lambda tx: outbox.take_due(tx, BATCH, HOLD_SECONDS, GRACE_SECONDS), lock=DeployLock.NONE
            )
            if entries:
                await self.deliver(entries)
                await self._forget()
            if len(entries) < BATCH:
                return

    async def deliver(self, entries: Sequence[OutboxEntry]) -> None:
        by_runtime: dict[str, list[OutboxEntry]] = {}
        for entry in entries:
            by_runtime.setdefault(entry.runtime, []).append(entry)
        for runtime, group in by_runtime.items():
            ids = [entry.outbox_id for entry in group]
            try:
                await self._hand_over(runtime, group)
            except TracelakeError as error:
                await self._note_failure(ids, error.message)

    async def _hand_over(self, name: str, entries: Sequence[OutboxEntry]) -> None:
        runtime = self._runtimes.get(name)
        if runtime is None:
            raise Unavailable("UnknownRuntime", f"this Dispatcher has no runtime {name!r}")
        match runtime.execution:
            case Execution.INVOKE:
                self._invoke(entries, self._settle)
                return
            case Execution.IN_PROCESS:
                for entry in entries:
                    if entry.task_id is not None:
                        self._run_local(entry.task_id)
            case Execution.QUEUE:
                await self._queue.publish(runtime.queue, [entry.payload for entry in entries])
        self._settle([entry.outbox_id for entry in entries])

    def _settle(self, ids: Sequence[int]) -> None:
        """Done with, to be forgotten soon. Also called by those who take their time."""
        self._delivered.inc(len(ids))
        if not self._settled:
            self._forget_at = asyncio.get_running_loop().time() + FORGET_SECONDS
            self._wakened.set()
        self._settled.extend(ids)

    async def _forget(self) -> None:
        """Without waiting for the disk: a crash may bring back what was forgotten."""
        ids, self._settled = self._settled, []
        if ids:
            await self._db.run(lambda tx: outbox.delivered(tx, ids), lock=DeployLock.NONE, durable=False)

    async def _note_failure(self, ids: Sequence[int], error: str) -> None:
        given_up = await self._db.run(
            lambda tx: outbox.failed(
                tx,
                ids,
                error,
                base_seconds=BACKOFF_BASE_SECONDS,
                max_seconds=BACKOFF_MAX_SECONDS,
                max_tries=MAX_TRIES,
            ),
            lock=DeployLock.NONE,
        )
        self._failed.inc(len(ids))
        log.warning("outbox delivery failed", count=len(ids), given_up=given_up, error=error)
