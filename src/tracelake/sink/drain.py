"""The drain of a buffer's queue: receive, merge, report and acknowledge, each while the next portion is under way.

Three stages pass portions on. The first receives messages and reads them; the second merges a portion in one
transaction; the third reports the dataset's position to the Dispatcher and only then acknowledges. The queues
between them are short, so memory is bounded by the size of a portion however many messages wait, and nothing is
merged far ahead of its event.

A portion that the database refuses is halved until the message at fault is alone. During an outage the same step is
tried again with growing pauses (``OutageRetry``), which is logged once and shown in the task's progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from prometheus_client import CollectorRegistry

from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Invalid, TracelakeError
from tracelake.hot.buffers import Batch, BufferStore, BufferTable, Merged, Retraction
from tracelake.hot.commit import REFUSED, Writer
from tracelake.leases.claim import WakeUps
from tracelake.leases.held_task import HeldTask
from tracelake.leases.until_answered import until_answered
from tracelake.objects.base import ObjectLocation
from tracelake.queue.base import Message
from tracelake.sink.batches import BatchReader, DeadLetters, PoisonMessage, ReceivedChange
from tracelake.sink.metrics import SinkMetrics

MAX_PORTION_BYTES = 2 * 1024 * 1024
MAX_PORTION_ROWS = 10_000
MAX_MESSAGES = 500
MAX_RECEIVED_BYTES = 2 * MAX_PORTION_BYTES
_FIRST_MESSAGES = 32
_TYPICAL_OVERHEAD = 1024
_WAIT_SECONDS = 1.0
_MERGED_AHEAD = 4
_OUTAGE_BACKOFF = Backoff(0.1, 5.0)
_LOG_SECONDS = 10.0
T = TypeVar("T")
ReportPosition = Callable[[int], Awaitable[object]]


@dataclass(slots=True)
class Portion:
    """Changes that are merged in one transaction."""

    table: BufferTable
    changes: list[ReceivedChange] = field(default_factory=list)
    size: int = 0
    rows: int = 0

    def fits(self, more: ReceivedChange) -> bool:
        if not self.changes:
            return True
        return (
            self.size + more.size <= MAX_PORTION_BYTES
            and self.rows + more.row_count <= MAX_PORTION_ROWS
            # A transaction writes by one schema, so a refreshed one begins another portion.
            and self.table is more.table
        )

    def add(self, more: ReceivedChange) -> None:
        self.table = more.table
        self.changes.append(more)
        self.size += more.size
        self.rows += more.row_count


@dataclass(frozen=True, slots=True)
class _Written:
    receipts: list[str]
    artifacts: list[ObjectLocation]
    merged: Merged


class Drain:
    """``report`` returns once the Dispatcher has accepted the position. Any error that it raises ends the drain."""

    def __init__(
        self,
        *,
        messages: WakeUps,
        reader: BatchReader,
        store: BufferStore,
        writer: Writer,
        dead_letters: DeadLetters,
        outages: OutageRetry,
        progress: SinkProgress,
        report: ReportPosition,
    ) -> None:
        self._messages = messages
        self._reader = reader
        self._store = store
        self._writer = writer
        self._dead_letters = dead_letters
        self._outages = outages
        self._progress = progress
        self._report = report
        # The sizes of these queues bound the memory of a drain.
        self._prepared: asyncio.Queue[Portion | None] = asyncio.Queue(1)
        self._written: asyncio.Queue[_Written | None] = asyncio.Queue(_MERGED_AHEAD)
        self._going = asyncio.Event()
        self._going.set()
        self._finishing = False
        self._room = _FIRST_MESSAGES

    async def run(self) -> None:
        """Runs until ``finish`` was called and all received messages are written, reported and acknowledged."""
        stages = [asyncio.create_task(stage) for stage in (self._receive(), self._merge(), self._settle())]
        try:
            # A stage that fails ends them all: the others would wait on their queues for ever.
            done, _ = await asyncio.wait(stages, return_when=asyncio.FIRST_EXCEPTION)
            for stage in done:
                stage.result()
        finally:
            for stage in stages:
                stage.cancel()
            await asyncio.gather(*stages, return_exceptions=True)

    def finish(self) -> None:
        self._finishing = True
        # A drain that is paused must wake up to end.
        self._going.set()

    def pause(self, paused: bool) -> None:
        """Messages stay in their queue while the drain is paused."""
        if paused and not self._finishing:
            self._going.clear()
        else:
            self._going.set()

    async def _receive(self) -> None:
        while not self._finishing:
            await self._going.wait()
            messages = await self._messages.receive(self._room, _WAIT_SECONDS, MAX_RECEIVED_BYTES)
            portion = Portion(self._reader.table)
            size = 0
            for message in messages:
                change = await self._read(message)
                if change is None:
                    continue
                size += change.size
                if not portion.fits(change):
                    await self._prepared.put(portion)
                    portion = Portion(change.table)
                portion.add(change)
            if portion.changes:
                await self._prepared.put(portion)
            if messages:
                self._adapt_room(len(messages), size)
        # Behind the last portion, so that all received messages are written first.
        await self._prepared.put(None)

    def _adapt_room(self, count: int, size: int) -> None:
        """Asks next time for as many messages as fit if they are like these: the queue pays for messages that it
        looks at and doesn't deliver."""
        each = size // count + _TYPICAL_OVERHEAD
        self._room = max(1, min(MAX_MESSAGES, MAX_RECEIVED_BYTES // each))

    async def _read(self, message: Message) -> ReceivedChange | None:
        try:
            return await self._outages.until_done(lambda: self._reader.read(message))
        except PoisonMessage as poison:
            await self._reject(message, poison)
            return None

    async def _merge(self) -> None:
        while (portion := await self._prepared.get()) is not None:
            await self._merge_portion(portion.table, portion.changes)
        await self._written.put(None)

    async def _merge_portion(self, table: BufferTable, changes: Sequence[ReceivedChange]) -> None:
        batches = [each.change for each in changes if isinstance(each.change, Batch)]
        retractions = [each.change for each in changes if isinstance(each.change, Retraction)]
        try:
            merged = await self._outages.until_done(
                lambda: self._store.merge(self._writer, table, batches, retractions)
            )
        except Invalid as refusal:
            # Only REFUSED is about the rows: halving can't help against anything else.
            if refusal.reason != REFUSED:
                raise
            if len(changes) == 1:
                await self._reject(changes[0].message, PoisonMessage(refusal.message, lasting=False))
                return
            half = len(changes) // 2
            await self._merge_portion(table, changes[:half])
            await self._merge_portion(table, changes[half:])
            return
        self._progress.merged([each.message for each in changes], merged)
        receipts = [each.message.receipt for each in changes]
        artifacts = [each.artifact for each in changes if each.artifact is not None]
        await self._written.put(_Written(receipts, artifacts, merged))

    async def _settle(self) -> None:
        """Reports all portions that were merged during the last report with one event."""
        ending = False
        while not ending:
            group = [await self._written.get()]
            while not self._written.empty():
                group.append(self._written.get_nowait())
            ending = group[-1] is None
            written = [each for each in group if each is not None]
            if not written:
                continue
            # A position covers all earlier ones.
            last = written[-1].merged
            if last.outbox_id is not None:
                await self._report(last.position)
                # After the Dispatcher has the event: a sink that dies in between sends it again.
                await self._forget(last.outbox_id)
            # Only now: until the event is accepted, the messages are what another attempt would start from.
            self._messages.done([receipt for each in written for receipt in each.receipts])
            for artifact in (artifact for each in written for artifact in each.artifacts):
                await self._reader.empty(artifact)

    async def _forget(self, outbox_id: int) -> None:
        await self._outages.until_done(lambda: self._store.mark_delivered(outbox_id))

    async def _reject(self, message: Message, poison: PoisonMessage) -> None:
        if await self._outages.until_done(lambda: self._dead_letters.reject(message, poison)):
            self._progress.dead_letter()


class OutageRetry:
    """Repeats an action until it succeeds. ``on_change`` receives the cause of an outage, and None at its end."""

    def __init__(self, held: HeldTask, on_change: Callable[[str | None], None]) -> None:
        self._held = held
        self._on_change = on_change
        self._away = False

    async def until_done(self, action: Callable[[], Awaitable[T]]) -> T:
        return await until_answered(action, _OUTAGE_BACKOFF, on_away=self._is_away, on_back=self._is_back)

    def _is_away(self, error: TracelakeError) -> None:
        if not self._away:
            self._away = True
            self._held.log.warning("sink_waits", reason=error.reason, error=error.message)
            self._on_change(error.message)

    def _is_back(self) -> None:
        if self._away:
            self._away = False
            self._held.log.info("sink_resumed")
            self._on_change(None)


class SinkProgress:
    """Counts since the attempt began, for its log and its progress. ``lag_seconds``: how long the oldest message of
    the last commit had waited."""

    def __init__(
        self, held: HeldTask, on_progress: Callable[[HeldTask], None], metrics: SinkMetrics | None = None
    ) -> None:
        self._held = held
        self._metrics = metrics or SinkMetrics(CollectorRegistry())
        self._on_progress = on_progress
        # The first commit is logged, however soon after the machine's start.
        self._logged_at = -_LOG_SECONDS
        self._messages = self._rows = self._retracted = self._dead_letters = 0
        self._position = 0
        self._lag = 0.0
        self._waits_for: str | None = None

    def merged(self, messages: Sequence[Message], result: Merged) -> None:
        self._messages += len(messages)
        self._rows += result.written
        self._retracted += result.retracted
        self._position = result.position
        oldest = min(message.enqueued_at for message in messages)
        # The queue's clock may be ahead of ours.
        self._lag = max(0.0, (datetime.now(UTC) - oldest).total_seconds())
        self._metrics.messages.inc(len(messages))
        self._metrics.rows.inc(result.written)
        self._metrics.retracted.inc(result.retracted)
        self._metrics.lag.set(self._lag)
        self._show()
        if time.monotonic() - self._logged_at >= _LOG_SECONDS:
            self._logged_at = time.monotonic()
            self._held.log.info("sink_wrote", **self._fields())

    def dead_letter(self) -> None:
        self._dead_letters += 1
        self._metrics.dead_letters.inc()
        self._show()

    def waits_for(self, what: str | None) -> None:
        self._waits_for = what
        if what is not None:
            self._metrics.outages.inc()
        self._show()

    def ended(self) -> None:
        self._held.log.info("sink_ended", **self._fields())

    def _show(self) -> None:
        waiting = {} if self._waits_for is None else {"waits_for": self._waits_for}
        self._held.progressed({**self._fields(), **waiting})
        self._on_progress(self._held)

    def _fields(self) -> dict[str, int | float]:
        return {
            "batches": self._messages,
            "rows": self._rows,
            "retracted": self._retracted,
            "dead_letters": self._dead_letters,
            "position": self._position,
            "lag_seconds": round(self._lag, 3),
        }
