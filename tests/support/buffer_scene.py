"""``BufferScene``: a Dispatcher, a buffered dataset, a task that publishes to it, and sinks that come and go.

with open_buffer_scene(cluster, folder) as scene:
    scene.deploy()
    publisher = await scene.publisher()
    await publisher.publish({"key": "a"})
    async with scene.sinking("sink") as sink: ...
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from tests.support.databases import install_data, role_dsn
from tests.support.processes import SinkProcess
from tests.support.site import Databases
from tests.support.worker_scene import MANUAL_SOURCE, WorkerScene, open_scene
from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse, CompleteRequest
from tracelake.embedded.postgres import Cluster
from tracelake.hot.install import WRITER_ROLE
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.settings import Secret

DAG = "alerting"
DATASET = "alerts"
COLUMNS = {"org_id": "uuid", "key": "text", "block_number": "bigint", "note": "text"}
PATIENCE = 60.0
_WAITING = "SELECT count(*) FROM tracelake_queue.messages WHERE queue LIKE 'buffer-%'"
_LEASE_PASSED = """SELECT tl_now() > $1::timestamptz + (SELECT max(heartbeat_timeout_seconds) FROM job
                   WHERE operator = 'buffer_sink') * interval '1 second'"""


@dataclass(frozen=True, slots=True)
class Publisher:
    """A claimed task of the job that publishes."""

    client: DispatcherClient
    lease: ClaimResponse

    async def publish(self, *records: Mapping[str, Any]) -> UUID:
        body = {
            "task_id": self.lease.task_id,
            "attempt": self.lease.attempt,
            "lease_token": self.lease.lease_token,
            "dataset": DATASET,
            "records": records,
        }
        answer = await self.client.publish(body, Secret(self.lease.capability_token or ""))
        return UUID(answer["batch_id"])

    async def complete(self) -> None:
        lease = self.lease
        await self.client.complete(
            CompleteRequest(lease.task_id, "Completed", lease.attempt, lease.lease_token)
        )


@dataclass(slots=True)
class BufferScene:
    site: WorkerScene
    data_dsn: str
    _clients: list[DispatcherClient] = field(default_factory=list)
    _next_block: int = 0

    def deploy(self, columns: Mapping[str, str] = COLUMNS, more: Sequence[Any] = ()) -> None:
        job = {
            "name": "work",
            "activation": "reactive",
            "runtime": "ecs_python",
            "operator": "noop",
            "inputs": [{"from": {"job": "src", "output": 0}}],
            "outputs": [{"name": "out", "storage": "none"}],
            "execution_strategy": "PerPartition",
        }
        schema = {"columns": columns, "unique": ["org_id", "key"]}
        dataset = {"storage": "postgres", "write_mode": "buffered", "schema": schema}
        dag = {"name": DAG, "jobs": [MANUAL_SOURCE, job, *more], "publish": {DATASET: dataset}}
        self.site.client.deploy(json.dumps(dag).encode())

    async def publisher(self) -> Publisher:
        """A task of blocks that no other publisher has, claimed."""
        start, end = self._next_block, self._next_block + 9
        self._next_block += 10
        self.site.client.trigger(DAG, "src", start=start, end=end)
        # That of an earlier publisher waits again once its lease is over.
        [task] = [
            each
            for each in self.site.client.tasks(dag=DAG, job="work").tasks
            if each.status == "Queued" and each.start == start
        ]
        client = self.client()
        [lease] = await client.claim([ClaimRequest(task.task_id, "tester", uuid4().hex)])
        assert lease.status == "Claimed", lease.reason
        return Publisher(client, lease)

    def client(self) -> DispatcherClient:
        replica = self.site.replica
        token = Secret(replica.worker_headers["X-Trace-Worker-Token"])
        client = DispatcherClient(replica.internal_url, token)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        while self._clients:
            await self._clients.pop().close()

    def sink(self, name: str, *options: str, data_write_dsn: str | None = None, **more: Any) -> SinkProcess:
        """One that isn't started yet."""
        replica = self.site.replica
        return SinkProcess(
            self.site.folder / name,
            internal_url=more.get("internal_url") or replica.internal_url,
            worker_token=replica.worker_headers["X-Trace-Worker-Token"],
            queue_dsn=more.get("queue_dsn") or self.site.databases.queue_dsn,
            object_root=self.site.folder / "dispatcher" / "objects",
            name=name,
            options=options,
            environment={"TRACELAKE_DATA_WRITE_DSN": data_write_dsn or self.writing_dsn},
        )

    @property
    def writing_dsn(self) -> str:
        return role_dsn(self.data_dsn, WRITER_ROLE)

    @asynccontextmanager
    async def sinking(self, name: str, *options: str, **more: Any) -> AsyncIterator[SinkProcess]:
        sink = self.sink(name, *options, **more)
        try:
            await sink.start()
            yield sink
        finally:
            await sink.close()

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query finds in the dataset's table, which it calls ``{}``; nothing while there is none."""
        shown = self.site.client.dataset(DATASET)
        connection = await asyncpg.connect(self.data_dsn)
        try:
            found = await connection.fetch(query.format(f"data.d_{shown.dataset_version.hex}"))
        except asyncpg.UndefinedTableError:
            return []
        finally:
            await connection.close()
        return [tuple(row) for row in found]

    async def keys(self) -> list[str]:
        return [key for (key,) in await self.rows("SELECT key FROM {} ORDER BY key")]

    def cursor(self) -> int | None:
        """How far the Dispatcher knows the dataset to have come."""
        return self.site.client.dataset(DATASET).cursor

    async def waiting(self) -> int:
        """Messages of buffers that nobody has acknowledged."""
        connection = await asyncpg.connect(self.site.databases.queue_dsn)
        try:
            return int(await connection.fetchval(_WAITING))
        finally:
            await connection.close()

    async def until_has(self, *keys: str) -> None:
        async def there() -> bool:
            return set(keys) <= set(await self.keys())

        await self._until(f"rows {keys}", there)

    async def until_acknowledged(self) -> None:
        async def none_left() -> bool:
            return await self.waiting() == 0

        await self._until("an empty queue", none_left)

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        async def holds() -> bool:
            return condition()

        await self._until(what, holds)

    async def lease_passes(self) -> None:
        """As much time as the sink's lease lasts, by the state database's clock."""
        databases = self.site.databases
        await databases.until(_LEASE_PASSED, await self._now())

    async def _now(self) -> datetime:
        connection = await asyncpg.connect(self.site.databases.state_dsn)
        try:
            now: datetime = await connection.fetchval("SELECT tl_now()")
            return now
        finally:
            await connection.close()

    async def _until(self, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not await condition():
            assert asyncio.get_running_loop().time() < deadline, f"never happened: {what}"
            await asyncio.sleep(0.05)


@contextmanager
def open_buffer_scene(
    cluster: Cluster, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[BufferScene]:
    name = f"data_{uuid4().hex[:8]}"
    cluster.ensure_database(name)
    data_dsn = cluster.dsn(name)
    install_data(data_dsn)
    with open_scene(Databases.create(cluster), folder, environment) as site:
        yield BufferScene(site, data_dsn)
