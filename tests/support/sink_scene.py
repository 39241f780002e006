"""``SinkScene``: a sink task on a real queue and a real data database, with a Dispatcher that only records.

scene = await SinkScene.open(queue_dsn, data_dsn, folder)
await scene.publish({"key": "a"})
async with scene.sinking():
    await scene.until_drained()
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
from prometheus_client import CollectorRegistry

from tests.support.databases import role_dsn
from tests.support.operator_process import a_task, an_output
from tracelake.contracts.buffers import (
    BufferBatch,
    BufferRetract,
    BufferSchemaResponse,
    DeadLetterRequest,
    DeadLetterResponse,
    SinkConfig,
    buffer_queue,
)
from tracelake.contracts.dispatcher_api import (
    ClaimResponse,
    CompleteRequest,
    EventOut,
    EventsRequest,
    EventsResponse,
)
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import Column, ColumnType
from tracelake.domain.errors import TracelakeError
from tracelake.domain.operators.catalog import BUFFER_SINK
from tracelake.hot.buffers import BufferStore
from tracelake.hot.install import WRITER_ROLE
from tracelake.leases.held_task import HeldTask
from tracelake.objects.directory import DirectoryStore
from tracelake.queue.base import Queue
from tracelake.queue.postgres import PostgresQueue
from tracelake.queue.postgres_install import migrate
from tracelake.settings import Secret
from tracelake.sink.metrics import SinkMetrics
from tracelake.sink.sink_task import SinkParts, SinkTask

ORG = "00000000-0000-4000-8000-0000000000cc"
COLUMNS = {
    "org_id": ColumnType.UUID,
    "key": ColumnType.TEXT,
    "block_number": ColumnType.BIGINT,
    "note": ColumnType.TEXT,
}
UNIQUE = ("org_id", "key")
PATIENCE = 30.0


def build_queue(dsn: str) -> None:
    async def migrated() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await migrate(connection)
        finally:
            await connection.close()

    asyncio.run(migrated())


def schema_of(columns: Mapping[str, ColumnType]) -> BufferSchema:
    return BufferSchema(tuple(Column(name, kind) for name, kind in columns.items()), UNIQUE)


class Listener:
    """The Dispatcher's part: it records what it receives, and refuses if a test has set ``refusal``."""

    def __init__(self, schema: BufferSchema) -> None:
        self.schema = schema
        self.cursors: list[int] = []
        self.letters: list[DeadLetterRequest] = []
        self.refusal: TracelakeError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = asyncio.Event()
        self.schema_questions = 0

    async def events(self, events: EventsRequest) -> EventsResponse:
        self.asked.set()
        await self.answers.wait()
        if self.refusal is not None:
            raise self.refusal
        self.cursors += [event.cursor for event in events.events if event.cursor is not None]
        return EventsResponse([EventOut(0, "counted", 0) for _ in events.events], 0)

    async def buffer_schema(self, dataset_uuid: UUID) -> BufferSchemaResponse:
        self.schema_questions += 1
        return BufferSchemaResponse(dataset_uuid, dataset_uuid, "alerts", self.schema.hash, self.schema)

    async def buffer_dead_letter(self, request: DeadLetterRequest) -> DeadLetterResponse:
        if self.refusal is not None:
            raise self.refusal
        self.letters.append(request)
        return DeadLetterResponse(len(self.letters))


class SinkScene:
    def __init__(self, queue: Queue, data_dsn: str, folder: Path) -> None:
        self.queue = queue
        self.data_dsn = data_dsn
        self.objects = DirectoryStore(folder / "objects")
        self.output = an_output(0, name="alerts", storage="postgres")
        self.task_id = uuid4()
        self.schema = schema_of(COLUMNS)
        self.listener = Listener(self.schema)
        self.name = buffer_queue(self.output.dataset_uuid)
        self.epoch = 0
        self.registry = CollectorRegistry()
        self.metrics = SinkMetrics(self.registry)
        self.held: HeldTask | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, queue_dsn: str, data_dsn: str, folder: Path) -> AsyncIterator[SinkScene]:
        queue = await PostgresQueue.open(queue_dsn, max_receives=1000)
        try:
            yield cls(queue, data_dsn, folder)
        finally:
            await queue.close()

    async def publish(
        self, *records: Mapping[str, Any], text: str | None = None, **fields: Any
    ) -> Mapping[str, Any]:
        """One batch; ``text`` in place of records, other fields of the message by name."""
        given: dict[str, Any] = {
            "records": json.dumps(records) if text is None else text,
            "producer": "dag/job",
            "scope_start": 0,
            "scope_end": 9,
            "revision": 0,
            "schema_hash": self.listener.schema.hash,
            "dataset_uuid": self.output.dataset_uuid,
            "dataset_version": self.output.dataset_version,
            "batch_id": uuid4(),
            "task_id": uuid4(),
            "attempt": 1,
            "row_count": len(records),
            **fields,
        }
        body: dict[str, Any] = msgspec.to_builtins(BufferBatch(**given))
        await self.put(body)
        return body

    async def retract(self, revision: int, start: int = 0, end: int = 9, producer: str = "dag/job") -> None:
        output = self.output
        message = BufferRetract(
            uuid4(), output.dataset_uuid, output.dataset_version, producer, uuid4(), 1, revision, start, end
        )
        await self.put(msgspec.to_builtins(message))

    async def put(self, *bodies: Mapping[str, Any]) -> None:
        await self.queue.publish(self.name, bodies, durable=True)

    @asynccontextmanager
    async def sinking(self, **more: Any) -> AsyncIterator[asyncio.Task[CompleteRequest | None]]:
        """A sink that holds the lease; killed at the end, if it runs still."""
        store = BufferStore(Secret(more.pop("dsn", None) or role_dsn(self.data_dsn, WRITER_ROLE)))
        task = self.task(store, **more)
        running = asyncio.create_task(task.run())
        try:
            yield running
        finally:
            task.kill()
            await asyncio.gather(running, return_exceptions=True)
            await store.close()

    def task(self, store: BufferStore, *, epoch: int | None = None) -> SinkTask:
        """As the next claim would give it."""
        self.epoch = epoch or self.epoch + 1
        config = SinkConfig("alerts", ORG, self.schema.hash, self.schema)
        payload = msgspec.structs.replace(
            a_task(
                BUFFER_SINK,
                config=msgspec.to_builtins(config),
                outputs=[self.output],
                runtime="sink",
                task_id=self.task_id,
            ),
            epoch=self.epoch,
        )
        self.held = HeldTask(ClaimResponse("Claimed", self.task_id), payload, uuid4(), [])
        parts = SinkParts(
            client=self.listener,
            queue=self.queue,
            store=store,
            objects=self.objects,
            on_progress=lambda _: None,
            metrics=self.metrics,
        )
        return SinkTask(self.held, parts)

    async def until(self, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not await condition():
            assert asyncio.get_running_loop().time() < deadline, f"never happened: {what}"
            await asyncio.sleep(0.01)

    async def until_drained(self) -> None:
        """Everything that was put into the queue is acknowledged."""

        async def empty() -> bool:
            depth = await self.queue.depth(self.name)
            return depth.visible + depth.in_flight + depth.delayed == 0

        await self.until("an empty queue", empty)

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query finds in the dataset's table, which it calls ``{}``."""
        connection = await asyncpg.connect(self.data_dsn)
        try:
            table = f"data.d_{self.output.dataset_version.hex}"
            return [tuple(row) for row in await connection.fetch(query.format(table))]
        finally:
            await connection.close()

    async def notes(self) -> dict[str, str]:
        return dict(await self.rows("SELECT key, note FROM {} WHERE retracted_at IS NULL"))
