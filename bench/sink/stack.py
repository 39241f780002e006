"""The stack under measurement: two durable Postgres, a Dispatcher, a sink, and a task that may publish."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec

from bench.sink.records import COLUMNS, UNIQUE, Record, Records, as_csv, as_json
from tests.support.databases import PASSWORD, role_dsn
from tests.support.processes import DispatcherProcess, SinkProcess
from tests.support.worker_scene import MANUAL_SOURCE
from tracelake import queue as queues
from tracelake.client import Client
from tracelake.contracts.buffers import BufferBatch, buffer_queue
from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse
from tracelake.contracts.headers import CAPABILITY_HEADER
from tracelake.contracts.user_api import DatasetDetail
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import Column, ColumnType
from tracelake.embedded.postgres import Cluster
from tracelake.hot.buffers import BufferStore, BufferTable
from tracelake.hot.install import WRITER_ROLE, install
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.http_link import open_link
from tracelake.settings import Secret

DATASET = "alerts"
_OK = 200
_LOOK_SECONDS = 0.005
_PUT_AT_ONCE = 1000

Copy = Callable[[str, str, Sequence[bytes]], float]


@dataclass
class SinkStack:
    folder: Path
    data: asyncpg.Connection[Any]
    data_owner_dsn: str
    queue_dsn: str
    dispatcher: DispatcherProcess
    dataset: DatasetDetail
    lease: ClaimResponse
    _sinks: list[SinkProcess] = field(default_factory=list)

    @property
    def schema(self) -> BufferSchema:
        columns = tuple(Column(name, ColumnType(kind)) for name, kind in COLUMNS.items())
        return BufferSchema(columns, tuple(UNIQUE))

    async def start_sink(self) -> SinkProcess:
        sink = SinkProcess(
            self.folder / "sink",
            internal_url=self.dispatcher.internal_url,
            worker_token=self.dispatcher.worker_headers["X-Trace-Worker-Token"],
            queue_dsn=self.queue_dsn,
            object_root=self.folder / "dispatcher" / "objects",
            name="sink",
            environment={"TRACELAKE_DATA_WRITE_DSN": role_dsn(self.data_owner_dsn, WRITER_ROLE)},
        )
        self._sinks.append(sink)
        await sink.start()
        return sink

    async def published(self, batches: Sequence[list[Record]], publishers: int) -> float:
        """From the first call until the last row is committed."""
        lease = self.lease
        fields = {
            "task_id": lease.task_id,
            "attempt": lease.attempt,
            "lease_token": lease.lease_token,
            "dataset": DATASET,
        }
        start = msgspec.json.encode(fields)[:-1] + b',"records":'
        bodies = [start + as_json(batch) + b"}" for batch in batches]
        rows = sum(map(len, batches))
        link = open_link(self.dispatcher.internal_url, {CAPABILITY_HEADER: lease.capability_token or ""})
        waiting = iter(bodies)

        async def publisher() -> None:
            for body in waiting:
                answer = await link.request("POST", "/v1/task/buffer-publish", body, seconds=60, headers=None)
                assert answer.status == _OK, answer.body[:500]

        await self._empty_table()
        wanted = await self.position() + rows
        began = time.monotonic()
        await asyncio.gather(*(publisher() for _ in range(publishers)))
        await self._reached(wanted)
        took = time.monotonic() - began
        await link.close()
        return took

    async def position(self) -> int:
        found = await self.data.fetchval("SELECT coalesce(max(position), 0) FROM tracelake.buffer")
        return int(found)

    async def _reached(self, position: int) -> None:
        while True:
            if await self.position() >= position:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def in_fresh_table(self, batches: Sequence[list[Record]], copy: Copy) -> float:
        """A table with the same columns and indexes, for COPY alone."""
        version = uuid4()
        store = BufferStore(Secret(role_dsn(self.data_owner_dsn, WRITER_ROLE)))
        await store.ensure(BufferTable(dataset_uuid=uuid4(), dataset_version=version, schema=self.schema))
        await store.close()
        org_id = uuid4()
        texts, first = [], 1
        for batch in batches:
            texts.append(as_csv(batch, org_id, first))
            first += len(batch)
        dsn = role_dsn(self.data_owner_dsn, WRITER_ROLE)
        took = await asyncio.to_thread(copy, dsn, f"d_{version.hex}", texts)
        await self._forget(version)
        return took

    async def put_in_queue(self, records: Records, count: int) -> None:
        queue = await queues.open(self.queue_dsn)
        for start in range(0, count, _PUT_AT_ONCE):
            bodies = [self._message(records) for _ in range(min(_PUT_AT_ONCE, count - start))]
            await queue.publish(buffer_queue(self.dataset.dataset_uuid), bodies)
        await queue.close()

    async def until_drained(self, sink: SinkProcess, rows: int) -> tuple[float, float]:
        """How long it took, and the most memory that was seen, in MiB."""
        began, most = time.monotonic(), 0.0
        while await self.position() < rows:
            most = max(most, self.memory_of(sink))
            await asyncio.sleep(0.1)
        return time.monotonic() - began, most

    def memory_of(self, sink: SinkProcess) -> float:
        status = Path(f"/proc/{sink.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return round(int(line.split()[1]) / 1024, 1)

    async def close(self) -> None:
        for sink in self._sinks:
            await sink.close()
        await self.dispatcher.close()
        await self.data.close()

    def _message(self, records: Records) -> dict[str, object]:
        batch = BufferBatch(
            batch_id=uuid4(),
            dataset_uuid=self.dataset.dataset_uuid,
            dataset_version=self.dataset.dataset_version,
            schema_hash=self.schema.hash,
            producer="bench/publisher",
            task_id=self.lease.task_id,
            attempt=1,
            revision=0,
            row_count=1,
            records=as_json(records.batch(1)).decode(),
        )
        built: dict[str, object] = msgspec.to_builtins(batch)
        return built

    async def _empty_table(self) -> None:
        """As empty as those that COPY writes to; positions go on."""
        table = f"data.d_{self.dataset.dataset_version.hex}"
        if await self.data.fetchval("SELECT to_regclass($1)", table) is not None:
            await self.data.execute(f"TRUNCATE {table}")
            await self.data.execute("CHECKPOINT")

    async def _forget(self, version: UUID) -> None:
        await self.data.execute("DELETE FROM tracelake.buffer WHERE dataset_version = $1", version)
        await self.data.execute(f"DROP TABLE data.d_{version.hex}")
        await self.data.execute("CHECKPOINT")


@asynccontextmanager
async def open_stack(folder: Path) -> AsyncIterator[SinkStack]:
    with Cluster(folder / "state", name="state") as state, Cluster(folder / "data", name="data") as data:
        for name in ("state", "queue"):
            state.ensure_database(name)
        data.ensure_database("data")
        data_owner_dsn, queue_dsn = data.dsn("data"), state.dsn("queue")
        await install(data_owner_dsn, writer_password=PASSWORD, reader_password=PASSWORD)
        dispatcher = DispatcherProcess(
            folder / "dispatcher", state_dsn=state.dsn("state"), queue_dsn=queue_dsn
        )
        await dispatcher.start()
        dataset, lease = await _prepare(dispatcher)
        connection = await asyncpg.connect(data_owner_dsn)
        stack = SinkStack(folder, connection, data_owner_dsn, queue_dsn, dispatcher, dataset, lease)
        try:
            yield stack
        finally:
            await stack.close()


async def _prepare(dispatcher: DispatcherProcess) -> tuple[DatasetDetail, ClaimResponse]:
    """A deployed dataset, and a task that holds its lease for long."""
    job = {
        "name": "publisher",
        "activation": "reactive",
        "runtime": "ecs_python",
        "operator": "noop",
        "inputs": [{"from": {"job": "src", "output": 0}}],
        "outputs": [{"name": "out", "storage": "none"}],
        "execution_strategy": "PerPartition",
        "heartbeat_timeout_seconds": 3600,
    }
    buffered = {
        "storage": "postgres",
        "write_mode": "buffered",
        "schema": {"columns": COLUMNS, "unique": UNIQUE},
    }
    dag = {"name": "bench", "jobs": [MANUAL_SOURCE, job], "publish": {DATASET: buffered}}
    with Client(
        dispatcher.user_url, dispatcher.user_headers["Authorization"].removeprefix("Bearer ")
    ) as user:
        user.deploy(json.dumps(dag).encode())
        user.trigger("bench", "src", start=0, end=9)
        [task] = user.tasks(dag="bench", job="publisher").tasks
        dataset = user.dataset(DATASET)
    worker = DispatcherClient(
        dispatcher.internal_url, Secret(dispatcher.worker_headers["X-Trace-Worker-Token"])
    )
    [lease] = await worker.claim([ClaimRequest(task.task_id, "bench")])
    await worker.close()
    assert lease.status == "Claimed", lease.reason
    return dataset, lease
