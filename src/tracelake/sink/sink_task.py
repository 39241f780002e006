"""One leased sink task: the only writer of one buffered dataset for as long as it holds its lease.

It begins with its fence in the data database, so that whoever held the lease before can't commit any more, then
makes the table as the schema declares it, says how far the dataset has come (an earlier attempt may have had no
time to), and drains the dataset's queue until somebody ends it. A refusal that says the lease is no longer its own
ends it at once.
"""

from __future__ import annotations

import asyncio
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
from tracelake.contracts.dispatcher_api import CompleteRequest, EventIn, EventsRequest, EventsResponse
from tracelake.domain.errors import Conflict, Invalid, NotFound, TracelakeError
from tracelake.domain.operator_catalog import BUFFER_SINK
from tracelake.hot.buffers import EVERYTHING, BufferStore, BufferTable
from tracelake.hot.commit import Writer
from tracelake.objects.base import ObjectStore
from tracelake.queue.base import Queue
from tracelake.secret import Secret
from tracelake.sink.batches import BatchReader
from tracelake.sink.dead_letter import DeadLetters
from tracelake.sink.drain import Drain
from tracelake.sink.patience import Patience
from tracelake.sink.tally import Tally
from tracelake.worker.held_task import HeldTask, Stop
from tracelake.worker.outcome import conclude
from tracelake.worker.wake_ups import WakeUps

VISIBILITY_SECONDS = 10.0
"""How long what a sink had received stays hidden after its death: no longer than its lease."""
_SETTLE_SECONDS = 1.0


class Platform(Protocol):
    """What a sink asks of the Dispatcher. Each call is repeated until it is answered."""

    async def events(self, events: EventsRequest) -> EventsResponse: ...

    async def buffer_schema(self, dataset_uuid: UUID) -> BufferSchemaResponse: ...

    async def buffer_dead_letter(self, request: DeadLetterRequest) -> DeadLetterResponse: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkParts:
    """What all tasks of a sink process share."""

    client: Platform
    queue: Queue
    store: BufferStore
    objects: ObjectStore
    on_progress: Callable[[HeldTask], None]


class SinkTask:
    """The task's control: what the heartbeat hears reaches the drain through it."""

    def __init__(self, held: HeldTask, parts: SinkParts) -> None:
        self._held = held
        self._parts = parts
        self._drain: Drain | None = None
        self._working: asyncio.Task[None] | None = None

    async def run(self) -> CompleteRequest | None:
        """What to report, or None when nobody waits for a report."""
        held = self._held
        gone = "it ended by itself"
        if held.stopped is None:
            self._working = asyncio.create_task(self._work())
            held.controlled_by(self)
            try:
                await asyncio.wait([self._working])
            finally:
                self._working.cancel()
                await asyncio.gather(self._working, return_exceptions=True)
                held.controlled_by(None)
            gone = self._why()
        return conclude(held, None, gone)

    def _why(self) -> str:
        assert self._working is not None
        error = None if self._working.cancelled() else self._working.exception()
        match error:
            case None:
                return "it ended by itself"
            case Conflict() | NotFound():
                stop = Stop.CANCELED if error.reason == "Canceled" else Stop.SUPERSEDED
                self._held.log.warning("sink_superseded", reason=error.reason)
                self._held.stop(stop)
                return error.message
            case TracelakeError():
                self._held.log.error("sink_failed", reason=error.reason, error=error.message)
                return f"{error.reason}: {error.message}"
            case _:
                self._held.log.error("sink_broke", exc_info=error)
                return f"{type(error).__name__} in the sink: {error}"

    def stop(self, why: Stop) -> None:
        if why is Stop.RELEASED and self._drain is not None:
            self._drain.finish()
        else:
            self.kill()

    def kill(self) -> None:
        if self._working is not None:
            self._working.cancel()

    def pause(self, paused: bool) -> None:
        self._held.log.info("sink_paused" if paused else "sink_resumed")
        if self._drain is not None:
            self._drain.pause(paused)

    def renew(self, token: Secret) -> None:
        """A sink has no use for it."""

    async def _work(self) -> None:
        config = _config(self._held)
        table = _table(self._held, config)
        tally = Tally(self._held, self._parts.on_progress)
        patience = Patience(self._held, tally.waits_for)
        writer = await self._begin(table, patience)
        messages = WakeUps(self._parts.queue, buffer_queue(table.dataset_uuid), VISIBILITY_SECONDS)

        async def refresh() -> BufferTable:
            return await self._refresh(table, patience)

        dead_letters = DeadLetters(
            self._held,
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
            patience=patience,
            tally=tally,
            tell=lambda position: self._tell(table, position),
        )
        self._held.log.info("sink_drains", dataset=config.dataset, dataset_uuid=str(table.dataset_uuid))
        self._drain.pause(self._held.paused)
        try:
            await self._drain.run()
        finally:
            tally.ended()
            await messages.close(_SETTLE_SECONDS)

    async def _begin(self, table: BufferTable, patience: Patience) -> Writer:
        held, store = self._held, self._parts.store
        assert held.payload.epoch is not None
        writer = Writer(task_id=held.task_id, epoch=held.payload.epoch, inputs={})
        await patience.until_done(lambda: store.begin(writer, table.dataset_version, EVERYTHING))
        await patience.until_done(lambda: store.ensure(table))
        # The position says all that an earlier attempt has left unsaid, another task of the dataset's included.
        position = await patience.until_done(lambda: store.position(table.dataset_version))
        if position > 0:
            await self._tell(table, position)
        for unsaid in await patience.until_done(lambda: store.unsaid(held.task_id)):
            await patience.until_done(partial(store.said, unsaid.outbox_id))
        return writer

    async def _refresh(self, table: BufferTable, patience: Patience) -> BufferTable:
        """A deploy has added columns since the claim."""
        found = await self._parts.client.buffer_schema(table.dataset_uuid)
        grown = BufferTable(
            dataset_uuid=table.dataset_uuid, dataset_version=table.dataset_version, schema=found.schema
        )
        await patience.until_done(lambda: self._parts.store.ensure(grown))
        self._held.log.info("sink_schema", schema_hash=found.schema_hash)
        return grown

    async def _tell(self, table: BufferTable, position: int) -> None:
        held = self._held
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
