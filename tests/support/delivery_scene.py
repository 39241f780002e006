"""``DeliveryScene``: a buffer scene with deliveries, receivers on loopback, and delivery processes.

async with scene.delivering() as sending: ...   # in this process, with short pauses
process = scene.process("one")                  # the real command, to be killed
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import asyncpg

from tests.support.buffer_scene import DATASET, BufferScene
from tests.support.databases import role_dsn
from tests.support.processes import WorkerProcess
from tests.support.worker_scene import MANUAL_SOURCE
from tracelake.contracts.deliveries import DeliveryDetail
from tracelake.delivery.addresses import Allowance
from tracelake.delivery.app import DeliverySettings, run_delivery
from tracelake.delivery.delivery_task import Patience
from tracelake.domain.backoff import Backoff
from tracelake.hot.install import READER_ROLE
from tracelake.settings import Secret
from tracelake.tokens.named_secrets import SecretProvider

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
COLUMNS = {
    "org_id": "uuid",
    "key": "text",
    "block_number": "bigint",
    "note": "text",
    "severity": "text",
    "payload": "jsonb",
    "happened_at": "timestamptz",
}
FOLLOWER: Mapping[str, Any] = {
    "name": "follower",
    "activation": "source",
    "runtime": "ecs_python",
    "operator": "block_follower",
    "source": {"kind": "always_on"},
    "outputs": 3,
    "config": {"chain_id": 31339, "rpc_pool": "main", "start_block": 0},
}
_FINALIZE = """INSERT INTO dataset_cursor (dataset_version, cursor, finalized)
               SELECT dv.dataset_version, $1, $1 FROM dataset_version dv JOIN job j USING (job_id)
               WHERE j.operator = 'block_follower' AND j.active
               ON CONFLICT (dataset_version)
               DO UPDATE SET cursor = excluded.cursor, finalized = excluded.finalized"""
_REPORT_HEAD = """INSERT INTO attempt (task_id, attempt, worker_id, lease_token, epoch, claimed_at, progress)
                  SELECT t.task_id, t.attempt, 'follower', gen_random_uuid(), 0, now(), $1::jsonb
                  FROM task t JOIN job j USING (job_id)
                  WHERE j.operator = 'block_follower' AND j.active AND t.status <> 'Canceled'
                  ON CONFLICT (task_id, attempt) DO UPDATE SET progress = excluded.progress"""
QUICK = Patience(
    backoff=Backoff(0.02, 0.1),
    gone_seconds=0.2,
    look_seconds=0.2,
    refresh_seconds=0.1,
    configured_seconds=0.1,
)
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Received:
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Reply = tuple[int, Mapping[str, str], bytes]
Answer = Callable[[Received], Reply | Awaitable[Reply | None] | None]


def accept(_: Received) -> Reply:
    return 200, {}, b"ok"


@dataclass(slots=True)
class Receiver:
    """An HTTP server that keeps what it receives; ``answer`` None closes the connection."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    answer: Answer = accept
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def open(self, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for each in tuple(self._connections):
            each.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._answer_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        received = Received(first.split()[1], headers, body)
        self.received.append(received)
        found = self.answer(received)
        reply = await found if isinstance(found, Awaitable) else found
        if reply is None:
            return False
        status, more, content = reply
        extra = "".join(f"{name}: {value}\r\n" for name, value in more.items())
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{extra}\r\n".encode() + content
        )
        await writer.drain()
        return True

    def bodies(self) -> list[Any]:
        return [each.json for each in self.received]

    def notes(self) -> list[tuple[str, str]]:
        """What came, as type and note."""
        return [(each["type"], each["data"]["note"]) for each in self.bodies()]


class DeliveryProcess(WorkerProcess):
    def _argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tracelake", "delivery", "--home", str(self.home)),
            *("--ready-file", str(self._ready_file), *self._options),
        ]


@dataclass(slots=True)
class DeliveryScene:
    buffers: BufferScene
    receiver: Receiver
    name: str = "ops"

    def delivery(self, name: str = "", **more: Any) -> dict[str, Any]:
        return {
            "name": name or self.name,
            "from": {"dataset": DATASET},
            "to": {"webhook": {"url_secret": "HOOK", "signing_secret": "HOOK_KEY"}},
            **more,
        }

    def deploy(self, *deliver: Mapping[str, Any]) -> None:
        """Of a dataset whose producer has a chain upstream, which ``finalize`` alone moves."""
        job = {
            "name": "work",
            "activation": "reactive",
            "runtime": "ecs_python",
            "operator": "noop",
            "inputs": [
                {"from": {"job": "src", "output": 0}},
                {"from": {"job": "follower", "output": 0}, "trigger": False},
            ],
            "outputs": [{"name": "out", "storage": "none"}],
            "execution_strategy": "PerPartition",
        }
        schema = {"columns": COLUMNS, "unique": ["org_id", "key"]}
        dataset = {"storage": "postgres", "write_mode": "buffered", "schema": schema}
        dag = {
            "name": "alerting",
            "jobs": [MANUAL_SOURCE, FOLLOWER, job],
            "publish": {DATASET: dataset},
            "deliver": list(deliver),
        }
        self.buffers.site.client.deploy(json.dumps(dag).encode())

    @property
    def reading_dsn(self) -> str:
        return role_dsn(self.buffers.data_dsn, READER_ROLE)

    @asynccontextmanager
    async def delivering(self, **more: Any) -> AsyncIterator[asyncio.Event]:
        """The delivery process inside of this one; gives the event that stops it."""
        replica = self.buffers.site.replica
        environment = {
            "TRACELAKE_SECRET_HOOK": self.receiver.url,
            "TRACELAKE_SECRET_HOOK_KEY": KEY,
            **more.pop("secrets", {}),
        }
        settings = DeliverySettings(
            internal_url=more.pop("internal_url", replica.internal_url),
            worker_token=Secret(replica.worker_headers["X-Trace-Worker-Token"]),
            queue_dsn=Secret(self.buffers.site.databases.queue_dsn),
            data_read_dsn=Secret(more.pop("data_read_dsn", self.reading_dsn)),
            secrets=SecretProvider(environment, more.pop("secrets_file", None)),
            worker_id=f"tester-{uuid4().hex[:8]}",
            allowance=more.pop("allowance", Allowance.parse("127.0.0.1")),
            patience=more.pop("patience", QUICK),
            **more,
        )
        stop, ready = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(run_delivery(settings, stop, asyncio.Event(), ready.set))
        try:
            await asyncio.wait_for(ready.wait(), PATIENCE)
            yield stop
        finally:
            stop.set()
            await asyncio.wait_for(running, PATIENCE)

    def process(self, name: str, **more: Any) -> DeliveryProcess:
        """The real command, not started yet."""
        replica = self.buffers.site.replica
        return DeliveryProcess(
            self.buffers.site.folder / name,
            internal_url=replica.internal_url,
            worker_token=replica.worker_headers["X-Trace-Worker-Token"],
            queue_dsn=self.buffers.site.databases.queue_dsn,
            object_root=self.buffers.site.folder / "dispatcher" / "objects",
            name=name,
            options=(),
            environment={
                "TRACELAKE_DATA_READ_DSN": more.get("data_read_dsn") or self.reading_dsn,
                "TRACELAKE_SECRET_HOOK": self.receiver.url,
                "TRACELAKE_SECRET_HOOK_KEY": KEY,
                "TRACELAKE_DELIVERY_ALLOW": "127.0.0.1",
                "PATH": os.environ["PATH"],
            },
        )

    def show(self, name: str = "", **query: Any) -> DeliveryDetail:
        return self.buffers.site.client.delivery("alerting", name or self.name, **query)

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, f"never happened: {what}"
            await asyncio.sleep(0.02)

    async def until_received(self, count: int) -> None:
        await self.until(f"{count} messages", lambda: len(self.receiver.received) >= count)

    async def until_recorded(self, name: str = "", **counts: int) -> None:
        """Until the delivery's counts are these."""

        def same() -> bool:
            found = self.show(name)
            return all(getattr(found, each) == count for each, count in counts.items())

        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not await asyncio.to_thread(same):
            assert asyncio.get_running_loop().time() < deadline, f"never {counts}: {self.show(name)}"
            await asyncio.sleep(0.05)

    async def change(self, statement: str, *arguments: object) -> None:
        """As the sink would, but at once: by the owner of the data database. ``{}`` is the table."""
        shown = self.buffers.site.client.dataset(DATASET)
        connection = await asyncpg.connect(self.buffers.data_dsn)
        try:
            await connection.execute(statement.format(f"data.d_{shown.dataset_version.hex}"), *arguments)
            await connection.execute("SELECT pg_notify('tracelake_rows', $1)", str(shown.dataset_version))
        finally:
            await connection.close()

    async def finalize(self, block: int) -> None:
        """The chain's last final block, as its follower's events report it."""
        connection = await asyncpg.connect(self.buffers.site.databases.state_dsn)
        try:
            await connection.execute(_FINALIZE, block)
        finally:
            await connection.close()

    async def report_head(self, block: int) -> None:
        """The chain's head, as its follower's progress reports it."""
        connection = await asyncpg.connect(self.buffers.site.databases.state_dsn)
        try:
            await connection.execute(_REPORT_HEAD, json.dumps({"head": block}))
        finally:
            await connection.close()

    async def rewrite(self, key: str, note: str, producer: str = "alerting/work") -> None:
        """A later revision of a row, whether it was retracted or not."""
        await self.change(
            "UPDATE {0} SET note = $2, producer = $3, revision = revision + 1, "
            "made_at_revision = made_at_revision + 1, retracted_at = NULL, "
            "position = (SELECT max(position) + 1 FROM {0}) WHERE key = $1",
            key,
            note,
            producer,
        )
        await self._follow_position()

    async def retract(self, *keys: str) -> None:
        """Rows are marked as a reorg has the sink mark them, with new positions."""
        await self.change(
            "UPDATE {0} t SET retracted_at = now(), position = n.top + n.place FROM "
            "(SELECT key, row_number() OVER (ORDER BY position) AS place, (SELECT max(position) FROM {0}) AS top "
            " FROM {0} WHERE key = ANY($1::text[])) n WHERE n.key = t.key",
            list(keys),
        )
        await self._follow_position()

    async def _follow_position(self) -> None:
        """The dataset's position, here and as the sink reports it."""
        await self.change(
            "UPDATE tracelake.buffer SET position = greatest(position, (SELECT max(position) FROM {}))"
        )
        shown = self.buffers.site.client.dataset(DATASET)
        [(position,)] = await self.buffers.rows("SELECT max(position) FROM {}")
        connection = await asyncpg.connect(self.buffers.site.databases.state_dsn)
        try:
            await connection.execute(
                "UPDATE dataset_cursor SET cursor = greatest(cursor, $2) WHERE dataset_version = $1",
                shown.dataset_version,
                position,
            )
        finally:
            await connection.close()
