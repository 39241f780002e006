"""A buffer's queue, drained: received, merged, told, acknowledged, each while the next is under way.

Three stages hand portions on. The first receives messages and reads them; the second merges a portion in one
transaction; the third tells the Dispatcher how far the dataset has come and only then acknowledges. Between
them there is room for little, so memory is bounded by the size of a portion whatever waits in the queue, and
nothing is merged far ahead of its event.

A portion that the database refuses is halved until the message at fault is alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tracelake.domain.errors import Invalid
from tracelake.hot.buffers import REFUSED, Batch, BufferStore, BufferTable, Merged, Retraction
from tracelake.hot.commit import Writer
from tracelake.objects.prefix import ObjectLocation
from tracelake.queue.base import Message
from tracelake.sink.batches import BatchReader, Poison, Taken
from tracelake.sink.dead_letter import DeadLetters
from tracelake.sink.patience import Patience
from tracelake.sink.tally import Tally
from tracelake.worker.wake_ups import WakeUps

MAX_PORTION_BYTES = 2 * 1024 * 1024
MAX_PORTION_ROWS = 10_000
MAX_MESSAGES = 500
MAX_RECEIVED_BYTES = 2 * MAX_PORTION_BYTES
_FIRST_MESSAGES = 32
_TYPICAL_OVERHEAD = 1024
_WAIT_SECONDS = 1.0
_MERGED_AHEAD = 4

Tell = Callable[[int], Awaitable[object]]


@dataclass(slots=True)
class Portion:
    """What is merged together."""

    table: BufferTable
    taken: list[Taken] = field(default_factory=list)
    size: int = 0
    rows: int = 0

    def fits(self, more: Taken) -> bool:
        if not self.taken:
            return True
        return (
            self.size + more.size <= MAX_PORTION_BYTES
            and self.rows + more.row_count <= MAX_PORTION_ROWS
            and self.table is more.table
        )

    def add(self, more: Taken) -> None:
        self.table = more.table
        self.taken.append(more)
        self.size += more.size
        self.rows += more.row_count


@dataclass(frozen=True, slots=True)
class _Written:
    receipts: list[str]
    artifacts: list[ObjectLocation]
    merged: Merged


class Drain:
    """``tell`` returns once the Dispatcher has accepted the position. All it raises ends the drain."""

    def __init__(
        self,
        *,
        messages: WakeUps,
        reader: BatchReader,
        store: BufferStore,
        writer: Writer,
        dead_letters: DeadLetters,
        patience: Patience,
        tally: Tally,
        tell: Tell,
    ) -> None:
        self._messages = messages
        self._reader = reader
        self._store = store
        self._writer = writer
        self._dead_letters = dead_letters
        self._patience = patience
        self._tally = tally
        self._tell = tell
        self._prepared: asyncio.Queue[Portion | None] = asyncio.Queue(1)
        self._written: asyncio.Queue[_Written | None] = asyncio.Queue(_MERGED_AHEAD)
        self._going = asyncio.Event()
        self._going.set()
        self._finishing = False
        self._room = _FIRST_MESSAGES

    async def run(self) -> None:
        """Until ``finish`` was called and what had been received is written, told and acknowledged."""
        stages = [asyncio.create_task(stage) for stage in (self._receive(), self._merge(), self._settle())]
        try:
            done, _ = await asyncio.wait(stages, return_when=asyncio.FIRST_EXCEPTION)
            for stage in done:
                stage.result()
        finally:
            for stage in stages:
                stage.cancel()
            await asyncio.gather(*stages, return_exceptions=True)

    def finish(self) -> None:
        self._finishing = True
        self._going.set()

    def pause(self, paused: bool) -> None:
        """Messages stay in their queue meanwhile."""
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
                taken = await self._read(message)
                if taken is None:
                    continue
                size += taken.size
                if not portion.fits(taken):
                    await self._prepared.put(portion)
                    portion = Portion(taken.table)
                portion.add(taken)
            if portion.taken:
                await self._prepared.put(portion)
            if messages:
                self._learn(len(messages), size)
        await self._prepared.put(None)

    def _learn(self, count: int, size: int) -> None:
        """As many messages next time as may come together if they are like these: what is looked at and left costs
        the queue something."""
        each = size // count + _TYPICAL_OVERHEAD
        self._room = max(1, min(MAX_MESSAGES, MAX_RECEIVED_BYTES // each))

    async def _read(self, message: Message) -> Taken | None:
        try:
            return await self._patience.until_done(lambda: self._reader.read(message))
        except Poison as poison:
            await self._reject(message, poison)
            return None

    async def _merge(self) -> None:
        while (portion := await self._prepared.get()) is not None:
            await self._merge_portion(portion.table, portion.taken)
        await self._written.put(None)

    async def _merge_portion(self, table: BufferTable, taken: Sequence[Taken]) -> None:
        batches = [each.said for each in taken if isinstance(each.said, Batch)]
        retractions = [each.said for each in taken if isinstance(each.said, Retraction)]
        try:
            merged = await self._patience.until_done(
                lambda: self._store.merge(self._writer, table, batches, retractions)
            )
        except Invalid as refusal:
            if refusal.reason != REFUSED:
                raise
            if len(taken) == 1:
                await self._reject(taken[0].message, Poison(refusal.message, lasting=False))
                return
            half = len(taken) // 2
            await self._merge_portion(table, taken[:half])
            await self._merge_portion(table, taken[half:])
            return
        self._tally.merged([each.message for each in taken], merged)
        receipts = [each.message.receipt for each in taken]
        artifacts = [each.artifact for each in taken if each.artifact is not None]
        await self._written.put(_Written(receipts, artifacts, merged))

    async def _settle(self) -> None:
        """What was merged while the last event was under way is told by one."""
        ending = False
        while not ending:
            group = [await self._written.get()]
            while not self._written.empty():
                group.append(self._written.get_nowait())
            ending = group[-1] is None
            written = [each for each in group if each is not None]
            if not written:
                continue
            last = written[-1].merged
            if last.outbox_id is not None:
                await self._tell(last.position)
                await self._forget(last.outbox_id)
            self._messages.done([receipt for each in written for receipt in each.receipts])
            for artifact in (artifact for each in written for artifact in each.artifacts):
                await self._reader.empty(artifact)

    async def _forget(self, outbox_id: int) -> None:
        await self._patience.until_done(lambda: self._store.said(outbox_id))

    async def _reject(self, message: Message, poison: Poison) -> None:
        if await self._patience.until_done(lambda: self._dead_letters.reject(message, poison)):
            self._tally.dead_letter()
