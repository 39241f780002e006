"""Step 3, outbox to queue: delivers committed wake-ups and messages of buffered datasets, at least once.

Entries that this process has just committed are delivered straight from memory; a sweep takes those that are due
later, were left behind by other processes, or failed. Delivered entries are deleted a moment later, many at a time,
without waiting for the disk: a crash may bring them back, and a second delivery is harmless.

Wake-ups and messages are delivered by separate loops, so that a task never waits behind a backlog of rows. A
wake-up that can't be published is tried again with backoff and given up visibly after many tries; the re-wake sweep
still finds its task. A message is never given up because the queue can't be reached; one that the queue refuses is
tried a few times, alone, and given up visibly, while its neighbours go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import structlog
from prometheus_client import CollectorRegistry, Counter

from tracelake.dispatcher.runtimes import Execution, RuntimeRegistry
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.queue.base import Queue
from tracelake.store import buffers, outbox
from tracelake.store.db import Database, DeployLock, OutboxEntry, OutboxKind, Transaction

BATCH = 500
HOLD_SECONDS = 30.0
GRACE_SECONDS = 1.0
FORGET_SECONDS = 0.2
"""Delay before delivered entries are deleted; well within the grace after which a sweep would take them."""
MAX_TRIES = 20
BUFFER_BATCH = 32
"""Messages per batch, of at most 256 KiB each."""
MAX_FRESH = 256
"""Maximum number of messages in memory; the rest is left to the sweep."""
MAX_REFUSALS = 5
_NEVER = 2**31 - 1
_HEAD_STARTS = 8
_WAKE_BACKOFF = Backoff(first=1.0, longest=300.0)
_BUFFER_BACKOFF = Backoff(first=1.0, longest=30.0)


log = structlog.get_logger(__name__)

TakeDue = Callable[[Transaction, int, float, float], Awaitable[list[OutboxEntry]]]


class _Delivery:
    """Entries of one kind: fresh ones from memory, all others by a sweep, and the record of those that failed.

    ``entries`` and ``delivery`` name them in the log.
    """

    def __init__(
        self,
        db: Database,
        queue: Queue,
        *,
        batch: int,
        backoff: Backoff,
        take_due: TakeDue,
        entries: str,
        delivery: str,
        delivered: Counter,
        failed: Counter,
    ) -> None:
        self._db = db
        self._queue = queue
        self._batch = batch
        self._backoff = backoff
        self._take_due = take_due
        self._entries = entries
        self._delivery = delivery
        self._delivered = delivered
        self._failed = failed
        self._fresh: list[OutboxEntry] = []
        self._wakened = asyncio.Event()
        db.on_commit(self.notice)

    def _to_deliver(self, entries: Sequence[OutboxEntry]) -> Sequence[OutboxEntry]:
        """Those of a commit that are delivered from memory."""
        raise NotImplementedError

    async def deliver(self, entries: Sequence[OutboxEntry]) -> None:
        raise NotImplementedError

    def notice(self, entries: Sequence[OutboxEntry]) -> None:
        """Receive the entries of a commit in this process."""
        fresh = self._to_deliver(entries)
        if fresh:
            self._fresh.extend(fresh)
            self._wakened.set()

    async def deliver_fresh(self) -> None:
        """Deliver forever what this process commits, as soon as it is committed."""
        while True:
            await self._pause()
            while self._fresh:
                # No await between the read and the swap, since commits append to the list at any await.
                batch, self._fresh = self._fresh[: self._batch], self._fresh[self._batch :]
                await self._tried(self.deliver(batch), len(batch))
            await self._tidy()

    async def sweep(self) -> None:
        """Deliver once everything that is due and that no other process is delivering."""
        while True:
            entries = await self._db.run(
                lambda tx: self._take_due(tx, self._batch, HOLD_SECONDS, GRACE_SECONDS), lock=DeployLock.NONE
            )
            if entries:
                await self.deliver(entries)
                await self._forget()
            # A full batch means that more may be due: a backlog is not left to the next pass.
            if len(entries) < self._batch:
                return

    async def _pause(self) -> None:
        """Wait for a commit of this process."""
        await self._wakened.wait()
        self._wakened.clear()

    async def _tidy(self) -> None:
        """Runs after fresh entries were delivered."""

    async def _forget(self) -> None:
        """Delete delivered entries that are still there."""

    async def _tried(self, work: Awaitable[None], count: int) -> None:
        try:
            await work
        except Unavailable as error:
            log.warning(f"{self._entries} wait for the sweep", count=count, error=error.message)
        except Exception:
            log.exception("loop failed", loop=f"fresh {self._entries}", count=count)

    async def _delete(self, ids: Sequence[int]) -> None:
        """Without waiting for the disk: a crash may bring them back, and a second delivery is harmless."""
        await self._db.run(lambda tx: outbox.delivered(tx, ids), lock=DeployLock.NONE, durable=False)

    async def _note_failure(self, entries: Sequence[OutboxEntry], error: str, max_tries: int) -> None:
        ids = [entry.outbox_id for entry in entries]
        given_up = await self._db.run(
            lambda tx: outbox.failed(tx, ids, error, backoff=self._backoff, max_tries=max_tries),
            lock=DeployLock.NONE,
        )
        self._failed.inc(len(ids))
        log.warning(f"{self._delivery} delivery failed", count=len(ids), given_up=given_up, error=error)


class OutboxDelivery(_Delivery):
    """Delivers wake-ups. ``run_local`` takes tasks of in-process runtimes, ``invoke`` wake-ups of functions with a
    callback for those that it is done with; everything else goes to its runtime's queue. Bulk
    tasks wait behind others that become ready up to ``max_bulk_wait`` seconds later."""

    def __init__(
        self,
        db: Database,
        queue: Queue,
        runtimes: RuntimeRegistry,
        run_local: Callable[[UUID, float], None],
        invoke: Callable[[Sequence[OutboxEntry], Callable[[Sequence[int]], None]], None],
        registry: CollectorRegistry,
        *,
        max_bulk_wait: float = 0.0,
    ) -> None:
        super().__init__(
            db,
            queue,
            batch=BATCH,
            backoff=_WAKE_BACKOFF,
            take_due=outbox.take_due,
            entries="outbox entries",
            delivery="outbox",
            delivered=Counter("tracelake_outbox_delivered_total", "Entries delivered.", registry=registry),
            failed=Counter(
                "tracelake_outbox_failed_total", "Failed deliveries of entries.", registry=registry
            ),
        )
        self._runtimes = runtimes
        self._max_bulk_wait = max_bulk_wait
        self._run_local = run_local
        self._invoke = invoke
        self._settled: list[int] = []
        self._forget_at = 0.0

    def _to_deliver(self, entries: Sequence[OutboxEntry]) -> Sequence[OutboxEntry]:
        # A retry's wake-up is due later; the sweep finds it then.
        return [entry for entry in entries if entry.due and entry.kind is OutboxKind.WAKE]

    async def _pause(self) -> None:
        """Wait for a commit of this process, or until delivered entries are to be deleted."""
        with suppress(TimeoutError):
            # With nothing to delete there is nothing to wait for but a commit.
            async with asyncio.timeout_at(self._forget_at if self._settled else None):
                await self._wakened.wait()
        self._wakened.clear()

    async def _tidy(self) -> None:
        if len(self._settled) >= BATCH or self._forget_at <= asyncio.get_running_loop().time():
            await self._tried(self._forget(), len(self._settled))

    async def deliver(self, entries: Sequence[OutboxEntry]) -> None:
        for group in _by_runtime(entries):
            try:
                await self._publish(group[0].runtime, group)
            # One runtime whose queue is away must not hold up the wake-ups of the others.
            except TracelakeError as error:
                await self._note_failure(group, error.message, MAX_TRIES)

    async def _publish(self, name: str, entries: Sequence[OutboxEntry]) -> None:
        runtime = self._runtimes.get(name)
        if runtime is None:
            # Another replica may know it, as during a roll-out of new settings, so it is tried again.
            raise Unavailable("UnknownRuntime", f"this Dispatcher has no runtime {name!r}")
        match runtime.execution:
            case Execution.INVOKE:
                # Not settled here: a function's wake-up stays in the outbox until its task is claimed.
                self._invoke(entries, self._settle)
                return
            case Execution.IN_PROCESS:
                for entry in entries:
                    if entry.task_id is not None:
                        self._run_local(entry.task_id, entry.behind(self._max_bulk_wait))
            case Execution.QUEUE:
                for start, bodies in self._by_head_start(entries).items():
                    await self._queue.publish(runtime.queue, bodies, head_start=start)
        self._settle([entry.outbox_id for entry in entries])

    def _by_head_start(self, entries: Sequence[OutboxEntry]) -> dict[float, list[dict[str, Any]]]:
        """Normal work has a head start of the longest that bulk work waits behind it, and bulk work of what it has
        waited, in few steps, since each is a publication of its own."""
        step = self._max_bulk_wait / _HEAD_STARTS
        groups: dict[float, list[dict[str, Any]]] = {}
        for entry in entries:
            steps = round((self._max_bulk_wait - entry.behind(self._max_bulk_wait)) / step) if step else 0
            groups.setdefault(steps * step, []).append(entry.payload)
        return groups

    def _settle(self, ids: Sequence[int]) -> None:
        """Mark entries as delivered, to be deleted soon. Functions call it later, when they were claimed."""
        self._delivered.inc(len(ids))
        # The first of a batch sets the time. If each moved it, a steady load would never delete any.
        if not self._settled:
            self._forget_at = asyncio.get_running_loop().time() + FORGET_SECONDS
            self._wakened.set()
        self._settled.extend(ids)

    async def _forget(self) -> None:
        # If the delete fails, these ids are forgotten here, and the sweep delivers the entries once more.
        ids, self._settled = self._settled, []
        if ids:
            await self._delete(ids)


class BufferDelivery(_Delivery):
    """Delivers messages of buffered datasets into their queues."""

    def __init__(self, db: Database, queue: Queue, registry: CollectorRegistry) -> None:
        super().__init__(
            db,
            queue,
            batch=BUFFER_BATCH,
            backoff=_BUFFER_BACKOFF,
            take_due=buffers.take_due,
            entries="buffer messages",
            delivery="buffer",
            delivered=Counter(
                "tracelake_buffer_messages_delivered_total",
                "Messages put into buffers' queues.",
                registry=registry,
            ),
            failed=Counter(
                "tracelake_buffer_messages_failed_total",
                "Failed tries to put messages into buffers' queues.",
                registry=registry,
            ),
        )

    def _to_deliver(self, entries: Sequence[OutboxEntry]) -> Sequence[OutboxEntry]:
        # Messages are up to 256 KiB each, and publishers don't slow down when the queue does.
        room = MAX_FRESH - len(self._fresh)
        return [entry for entry in entries if entry.kind is OutboxKind.BUFFER][: max(0, room)]

    async def deliver(self, entries: Sequence[OutboxEntry]) -> None:
        """If a crash brings a published message back, its rows are still written once."""
        done = [entry for group in _by_runtime(entries) for entry in await self._publish(group)]
        if done:
            await self._delete([entry.outbox_id for entry in done])
            self._delivered.inc(len(done))

    async def _publish(self, group: Sequence[OutboxEntry]) -> Sequence[OutboxEntry]:
        """Publish messages of one queue; returns those that it accepted."""
        try:
            # Durable: these rows exist nowhere else once they
            # have left the outbox. A wake-up can be sent again.
            await self._queue.publish(group[0].runtime, [entry.payload for entry in group], durable=True)
        except Unavailable as error:
            await self._note_failure(group, error.message, _NEVER)
            return ()
        except TracelakeError as error:
            if len(group) == 1:
                await self._note_failure(group, error.message, MAX_REFUSALS)
                return ()
            # One message that the queue refuses must not take its neighbours with it.
            return [taken for entry in group for taken in await self._publish([entry])]
        return group


def _by_runtime(entries: Sequence[OutboxEntry]) -> Iterator[list[OutboxEntry]]:
    groups: dict[str, list[OutboxEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.runtime, []).append(entry)
    yield from groups.values()
