"""Outbox to a buffered dataset's queue: what was published is delivered at least once, and durably.

Apart from wake-ups, so that a task never waits behind a backlog of rows. What this process has just committed
is delivered straight from memory; a sweep takes what other processes left behind and what failed. A queue that
can't be reached is tried for as long as it takes: rows are never given up for an outage. A message that the
queue refuses for what it is, is tried a few times, alone, and given up visibly; its neighbours go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence

import structlog
from prometheus_client import CollectorRegistry, Counter

from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.queue.base import Queue
from tracelake.store import buffers, outbox
from tracelake.store.db import Database, DeployLock
from tracelake.store.outbox_entry import OutboxEntry, OutboxKind

log = structlog.get_logger(__name__)

BATCH = 32
"""Messages at a time, of at most 256 KiB each."""
MAX_FRESH = 256
"""In memory at a time; what comes on top is left to the sweep."""
HOLD_SECONDS = 30.0
GRACE_SECONDS = 1.0
BACKOFF_BASE_SECONDS = 1.0
BACKOFF_MAX_SECONDS = 30.0
MAX_REFUSALS = 5
_NEVER = 2**31 - 1


class BufferDelivery:
    def __init__(self, db: Database, queue: Queue, registry: CollectorRegistry) -> None:
        self._db = db
        self._queue = queue
        self._fresh: list[OutboxEntry] = []
        self._wakened = asyncio.Event()
        self._delivered = Counter(
            "tracelake_buffer_messages_delivered_total",
            "Messages put into buffers' queues.",
            registry=registry,
        )
        self._failed = Counter(
            "tracelake_buffer_messages_failed_total",
            "Failed tries to put messages into buffers' queues.",
            registry=registry,
        )
        db.on_commit(self.notice)

    def notice(self, entries: Sequence[OutboxEntry]) -> None:
        """Hear of entries that were just committed here."""
        room = MAX_FRESH - len(self._fresh)
        fresh = [entry for entry in entries if entry.kind is OutboxKind.BUFFER][: max(0, room)]
        if fresh:
            self._fresh.extend(fresh)
            self._wakened.set()

    async def deliver_fresh(self) -> None:
        """For ever: deliver what was committed here as soon as it is."""
        while True:
            await self._wakened.wait()
            self._wakened.clear()
            while self._fresh:
                batch, self._fresh = self._fresh[:BATCH], self._fresh[BATCH:]
                await self._tried(self.deliver(batch), len(batch))

    async def _tried(self, work: Awaitable[None], count: int) -> None:
        try:
            await work
        except Unavailable as error:
            log.warning("buffer messages wait for the sweep", count=count, error=error.message)
        except Exception:
            log.exception("loop failed", loop="fresh buffer messages", count=count)

    async def sweep(self) -> None:
        """Once: deliver everything that is due and that nobody else is delivering."""
        while True:
            entries = await self._db.run(
                lambda tx: buffers.take_due(tx, BATCH, HOLD_SECONDS, GRACE_SECONDS), lock=DeployLock.NONE
            )
            if entries:
                await self.deliver(entries)
            if len(entries) < BATCH:
                return

    async def deliver(self, entries: Sequence[OutboxEntry]) -> None:
        """What is in the queue leaves the outbox without waiting for the disk: a crash may bring it back, and
        the same rows are written once."""
        done = [entry for group in _by_queue(entries) for entry in await self._hand_over(group)]
        if done:
            ids = [entry.outbox_id for entry in done]
            await self._db.run(lambda tx: outbox.delivered(tx, ids), lock=DeployLock.NONE, durable=False)
            self._delivered.inc(len(ids))

    async def _hand_over(self, group: Sequence[OutboxEntry]) -> Sequence[OutboxEntry]:
        """Those of one queue; answers which of them it has."""
        try:
            await self._queue.publish(group[0].runtime, [entry.payload for entry in group], durable=True)
        except Unavailable as error:
            await self._note_failure(group, error.message, _NEVER)
            return ()
        except TracelakeError as error:
            if len(group) == 1:
                await self._note_failure(group, error.message, MAX_REFUSALS)
                return ()
            return [taken for entry in group for taken in await self._hand_over([entry])]
        return group

    async def _note_failure(self, entries: Sequence[OutboxEntry], error: str, max_tries: int) -> None:
        given_up = await self._db.run(
            lambda tx: outbox.failed(
                tx,
                [entry.outbox_id for entry in entries],
                error,
                base_seconds=BACKOFF_BASE_SECONDS,
                max_seconds=BACKOFF_MAX_SECONDS,
                max_tries=max_tries,
            ),
            lock=DeployLock.NONE,
        )
        self._failed.inc(len(entries))
        log.warning("buffer delivery failed", count=len(entries), given_up=given_up, error=error)


def _by_queue(entries: Sequence[OutboxEntry]) -> Iterator[list[OutboxEntry]]:
    groups: dict[str, list[OutboxEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.runtime, []).append(entry)
    yield from groups.values()
