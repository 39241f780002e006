"""One leased sink task: the only writer of one buffered dataset for as long as it holds its lease.

It first sets its fence in the data database, so that an earlier holder of the lease can't commit any more. Then it
creates the table as the schema declares it, reports the dataset's position (an earlier attempt may have ended
before it could), and drains the dataset's queue until it is stopped. A refusal that says the lease is no longer its
own ends it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from uuid import UUID

import msgspec

from tracelake.contracts.buffers import (
    BufferSchemaResponse,
    DeadLetterRequest,
    DeadLetterResponse,
    SinkConfig,
    buffer_queue,
)
from tracelake.contracts.dispatcher_api import EventIn, EventsRequest, EventsResponse
from tracelake.domain.errors import Invalid
from tracelake.domain.operators.catalog import BUFFER_SINK
from tracelake.hot.buffers import EVERYTHING, BufferStore, BufferTable
from tracelake.hot.commit import Writer
from tracelake.leases.claim import WakeUps
from tracelake.leases.held_task import HeldTask
from tracelake.leases.platform_task import PlatformTask
from tracelake.objects.base import ObjectStore
from tracelake.queue.base import Queue
from tracelake.sink.batches import BatchReader, DeadLetters
from tracelake.sink.drain import Drain, OutageRetry, SinkProgress
from tracelake.sink.metrics import SinkMetrics

#: How long received messages stay hidden after a sink's death: no longer than its lease.
VISIBILITY_SECONDS = 10.0
_SETTLE_SECONDS = 1.0


class SinkDispatcher(Protocol):
    """The Dispatcher's calls that a sink uses. Each call is repeated until it is answered."""

    async def events(self, events: EventsRequest) -> EventsResponse: ...

    async def buffer_schema(self, dataset_uuid: UUID) -> BufferSchemaResponse: ...

    async def buffer_dead_letter(self, request: DeadLetterRequest) -> DeadLetterResponse: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkParts:
    """The connections that all tasks of a sink process share."""

    client: SinkDispatcher
    queue: Queue
    store: BufferStore
    objects: ObjectStore
    on_progress: Callable[[HeldTask], None]
    metrics: SinkMetrics | None = None


class SinkTask(PlatformTask):
    """The task's control: the heartbeat's answers reach the drain through it."""

    name = "sink"

    def __init__(self, held: HeldTask, parts: SinkParts) -> None:
        super().__init__(held)
        self._parts = parts
        self._drain: Drain | None = None

    def finish(self) -> bool:
        """Received messages may still be written."""
        if self._drain is None:
            return False
        self._drain.finish()
        return True

    def hold(self, paused: bool) -> None:
        if self._drain is not None:
            self._drain.pause(paused)

    async def work(self) -> None:
        config = _config(self.held)
        table = _table(self.held, config)
        progress = SinkProgress(self.held, self._parts.on_progress, self._parts.metrics)
        outages = OutageRetry(self.held, progress.waits_for)
        writer = await self._begin(table, outages)
        messages = WakeUps(self._parts.queue, buffer_queue(table.dataset_uuid), VISIBILITY_SECONDS)

        async def refresh() -> BufferTable:
            return await self._refresh(table, outages)

        dead_letters = DeadLetters(
            self.held,
            table.dataset_uuid,
            send=self._parts.client.buffer_dead_letter,
            messages=messages,
            queue=self._parts.queue,
        )
        self._drain = Drain(
            messages=messages,
            reader=BatchReader(table, config.org_id, self._parts.objects, refresh),
            store=self._parts.store,
            writer=writer,
            dead_letters=dead_letters,
            outages=outages,
            progress=progress,
            report=lambda position: self._report_position(table, position),
        )
        self.held.log.info("sink_drains", dataset=config.dataset, dataset_uuid=str(table.dataset_uuid))
        # A heartbeat may have paused the task before there was a drain.
        self._drain.pause(self.held.paused)
        try:
            await self._drain.run()
        finally:
            progress.ended()
            # Releases the messages that weren't written; the next holder needn't wait until they show again.
            await messages.close(_SETTLE_SECONDS)

    async def _begin(self, table: BufferTable, outages: OutageRetry) -> Writer:
        held, store = self.held, self._parts.store
        assert held.payload.epoch is not None
        writer = Writer(task_id=held.task_id, epoch=held.payload.epoch, inputs={})
        # The fence first: after it no earlier holder can move the position that is read below.
        await outages.until_done(lambda: store.begin(writer, table.dataset_version, EVERYTHING))
        await outages.until_done(lambda: store.ensure(table))
        # The position covers all events that an earlier attempt didn't send, also one of another task of the
        # dataset.
        position = await outages.until_done(lambda: store.position(table.dataset_version))
        if position > 0:
            await self._report_position(table, position)
        for pending in await outages.until_done(lambda: store.pending_events(held.task_id)):
            await outages.until_done(partial(store.mark_delivered, pending.outbox_id))
        return writer

    async def _refresh(self, table: BufferTable, outages: OutageRetry) -> BufferTable:
        """The table as it is deployed now: a deploy has added columns since the claim."""
        found = await self._parts.client.buffer_schema(table.dataset_uuid)
        grown = BufferTable(
            dataset_uuid=table.dataset_uuid, dataset_version=table.dataset_version, schema=found.schema
        )
        await outages.until_done(lambda: self._parts.store.ensure(grown))
        self.held.log.info("sink_schema", schema_hash=found.schema_hash)
        return grown

    async def _report_position(self, table: BufferTable, position: int) -> None:
        held = self.held
        event = EventIn(table.dataset_uuid, table.dataset_version, cursor=position)
        await self._parts.client.events(EventsRequest(held.task_id, held.attempt, [event], held.lease_token))


def _config(held: HeldTask) -> SinkConfig:
    if held.payload.operator != BUFFER_SINK:
        raise Invalid("UnknownOperator", f"a sink runs {BUFFER_SINK}, not {held.payload.operator!r}")
    if held.payload.epoch is None:
        raise Invalid("NoEpoch", "an attempt without an epoch can't write to the data database")
    try:
        return msgspec.convert(held.payload.config, SinkConfig)
    except msgspec.ValidationError as error:
        raise Invalid("InvalidConfig", f"the task's config isn't a sink's: {error}") from None


def _table(held: HeldTask, config: SinkConfig) -> BufferTable:
    if len(held.payload.outputs) != 1:
        raise Invalid("InvalidConfig", f"a sink has one output, not {len(held.payload.outputs)}")
    [output] = held.payload.outputs
    return BufferTable(
        dataset_uuid=output.dataset_uuid, dataset_version=output.dataset_version, schema=config.schema
    )
