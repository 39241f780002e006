"""``FollowScene``: a block follower step by step, with a chain served over RPC and a real data database.

The test plays the wrapper: commits are made by the code that a worker uses, and their events reach
``Platform``, which applies them as the Dispatcher does. ``Reader`` is a dependent that trusts events alone.
"""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.contracts.dispatcher_api import (
    EventIn,
    InvalidateRange,
    JobRef,
    PayloadOutput,
    PayloadWritten,
    TaskPayload,
)
from tracelake.contracts.operator_protocol import Action, CommitRows, EmitEvents, SaveState
from tracelake.contracts.rpc_pool import EndpointConfig, PoolConfig
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import Invalid
from tracelake.evm.decode import decode
from tracelake.evm.raw_block import BlockMismatch, ChainTable, RawBlock
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.hot.commit import HotStore
from tracelake.operators.block_follower.decide import FollowerConfig
from tracelake.operators.block_follower.follower import Follower
from tracelake.operators.block_follower.load import FollowedTables, InProcessLoader
from tracelake.operators.block_follower.operator import follow, resume
from tracelake.operators.context import Context
from tracelake.settings import Secret
from tracelake.tables.data_database import DataDatabase
from tracelake.tables.hot_and_cold import read_stored
from tracelake.worker.data_commit import DataCommitter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

USUAL = ("blocks", "transactions", "logs")


@dataclass
class Version:
    """A dataset version as the platform knows it."""

    name: str
    uuid: UUID = field(default_factory=uuid4)
    version: UUID = field(default_factory=uuid4)
    cursor: int | None = None
    finalized: int | None = None
    invalidations: list[tuple[int, int, bool]] = field(default_factory=list)

    def invalidate(self, start: int, end: int, *, by_others: bool = True) -> None:
        self.invalidations.append((start, end, by_others))
        if self.cursor is not None and self.cursor >= start:
            self.cursor = start - 1 if start else None
            if self.finalized is not None and self.finalized >= start:
                self.finalized = start - 1

    def written(self) -> PayloadWritten:
        reached = -1 if self.cursor is None else self.cursor
        back = [InvalidateRange(s, e) for s, e, others in self.invalidations if others and e > reached]
        return PayloadWritten(self.cursor, self.finalized, back)


class Platform:
    """Applies events as the Dispatcher does, and records them."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self.versions = [Version(name) for name in outputs]
        self.received: list[EventIn] = []
        self.refused: list[EventIn] = []

    def accept(self, events: Sequence[EventIn]) -> None:
        for event in events:
            self.received.append(event)
            [version] = [each for each in self.versions if each.uuid == event.dataset_uuid]
            if event.invalidate is not None:
                version.invalidate(event.invalidate.start, event.invalidate.end, by_others=False)
            elif event.revision is not None and event.revision < len(version.invalidations):
                self.refused.append(event)
            else:
                assert event.cursor is not None
                version.cursor = max(event.cursor, -1 if version.cursor is None else version.cursor)
                if event.finalized is not None:
                    version.finalized = max(event.finalized, version.finalized or 0)


class Reader:
    """A dependent that trusts events alone: it reads rows up to the cursor and drops invalidated ones."""

    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}
        self._cursor = -1
        self._read = 0

    def read(self, platform: Platform, version: Version, fetch: Callable[[int, int], dict[int, Any]]) -> None:
        for event in platform.received[self._read :]:
            if event.dataset_uuid != version.uuid or event in platform.refused:
                continue
            if event.invalidate is not None:
                first = event.invalidate.start
                self.rows = {number: row for number, row in self.rows.items() if number < first}
                self._cursor = min(self._cursor, first - 1)
        self._read = len(platform.received)
        reached = -1 if version.cursor is None else version.cursor
        if reached > self._cursor:
            self.rows |= fetch(self._cursor + 1, reached)
            self._cursor = reached


class _Wrapper:
    """The wrapper's side of one attempt, on the test's own thread."""

    def __init__(self, scene: FollowScene, task: TaskPayload) -> None:
        self._scene = scene
        self._task = task
        self._changed = threading.Condition()
        self.canceled = False
        self.paused = False
        self.waits_for = 0.0
        self.progress: dict[str, Any] = {}

    def call(self, action: Action) -> Any:
        scene = self._scene
        match action:
            case EmitEvents(events):
                scene.platform.accept(events)
                return {"accepted": len(events)}
            case SaveState(state):
                scene.state = state
                return None
            case CommitRows():
                scene.commits.append(action)
                done = scene.runner.run(scene.committer.commit(self._task, action, scene.say))
                return msgspec.to_builtins(done)
            case _:
                raise AssertionError(action)

    def report(self, fields: dict[str, Any]) -> None:
        self.progress = fields

    def wait(self, seconds: float) -> None:
        with self._changed:
            if not self.canceled:
                self.waits_for = seconds
                self._changed.wait(seconds)
                self.waits_for = 0.0

    def set_flags(self, *, canceled: bool = False, paused: bool = False) -> None:
        with self._changed:
            self.canceled, self.paused = canceled, paused
            self._changed.notify_all()

    def spark(self) -> SparkSession:
        raise Invalid("NoSpark", "there is none here")


@dataclass
class Attempt:
    """One life of the follower."""

    follower: Follower
    ctx: Context
    wrapper: _Wrapper
    begun: bool = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """As the operator does it, in a thread of its own, until the block ends."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                follow(self.follower)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="follower")
        thread.start()
        try:
            yield
        finally:
            self.wrapper.set_flags(canceled=True)
            thread.join()
        if failures:
            raise failures[0]

    def step(self) -> float:
        if not self.begun:
            resume(self.follower)
            self.begun = True
        return self.follower.step()

    def again(self) -> None:
        """Something was unavailable: as ``follow`` does it, what is staged is dropped, and it begins anew."""
        self.follower.tables.reset_staging()
        self.begun = False

    def settle(self, steps: int = 1000) -> None:
        """Until it has nothing to do. Blocks of an endpoint that the others contradict are asked for again, as
        ``follow`` does it: whose blocks are fetched first depends on who answered first."""
        for _ in range(steps):
            try:
                if self.step() > 0:
                    return
            except BlockMismatch:
                self.follower.tables.drop_staged()
        raise AssertionError("it never came to rest")


class FollowScene:
    def __init__(self, dsn: str, writing: str, reading: str, outputs: Sequence[str] = USUAL) -> None:
        """The DSNs are the administrator's, the writer's and the reader's."""
        self.admin = psycopg.connect(dsn, autocommit=True)
        self._reading = reading
        self.platform = Platform(outputs)
        self.runner = asyncio.Runner()
        self.committer = DataCommitter(HotStore(Secret(writing)))
        self.commits: list[CommitRows] = []
        self.state: Any = None
        self.deaf = False
        """The Dispatcher can't be reached: no event of a commit arrives."""
        self._task_id = uuid4()
        self._epoch = 0
        self._open: list[tuple[Context, Pool]] = []

    async def say(self, events: Sequence[EventIn]) -> None:
        if self.deaf:
            raise ConnectionError("the process dies here")
        self.platform.accept(events)

    def attempt(self, *urls: str, quorum: int = 1, **config: Any) -> Attempt:
        """Claim and start. Pending events of earlier attempts are sent first, as a worker does it."""
        self._epoch += 1
        settings = {"chain_id": 1, "rpc_pool": "main", "shorter_after_seconds": 0, **config}
        task = self._task(settings)
        self.runner.run(self.committer.begin(task, self.say))
        wrapper = _Wrapper(self, task)
        ticket = self.runner.run(self.committer.admit(task))
        assert ticket is not None
        ctx = Context(task, wrapper, state=self.state, data_ticket_dsn=ticket.dsn.reveal())
        parsed = FollowerConfig.parse(settings)
        endpoints = tuple(
            EndpointConfig(name=f"node{place}", url=url, timeout_seconds=5.0)
            for place, url in enumerate(urls)
        )
        pool = Pool(PoolConfig(name="main", endpoints=endpoints, deadline_seconds=5.0, quorum=quorum))
        self._open.append((ctx, pool))
        tables = FollowedTables(ctx)
        at_tip = InProcessLoader(tables, pool, parsed)
        return Attempt(Follower(ctx, parsed, pool, tables, at_tip), ctx, wrapper)

    def table(self, name: str) -> pa.Table:
        [version] = [each for each in self.platform.versions if each.name == name]
        return stored_table(self._reading, version.version, name)

    def hashes(self) -> dict[int, str]:
        table = self.table("blocks")
        numbers, hashes = table["block_number"].to_pylist(), table["block_hash"].to_pylist()
        return dict(zip(numbers, ("0x" + each.hex() for each in hashes), strict=True))

    def cut(self, name: str, start: int, end: int) -> None:
        """Delete rows without the platform's knowledge."""
        [version] = [each for each in self.platform.versions if each.name == name]
        table = sql.Identifier("data", f"d_{version.version.hex}")
        self.admin.execute(
            sql.SQL("DELETE FROM {} WHERE block_number BETWEEN %s AND %s").format(table), [start, end]
        )

    def cut_connections(self) -> None:
        """All but the test's own."""
        self.admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    def close(self) -> None:
        for ctx, pool in self._open:
            ctx.close()
            pool.close()
        self.runner.run(self.committer.close())
        self.runner.close()
        self.admin.close()

    def _task(self, config: dict[str, Any]) -> TaskPayload:
        return TaskPayload(
            task_id=self._task_id,
            attempt=self._epoch,
            epoch=self._epoch,
            job=JobRef("chain", "follower"),
            operator="block_follower",
            config=config,
            inputs=[],
            outputs=[self._output(place, each) for place, each in enumerate(self.platform.versions)],
            runtime="ecs_python",
            timeout_seconds=600,
            heartbeat_timeout_seconds=120,
            update_strategy="replace",
            unique_key=[],
            secrets=[],
        )

    def _output(self, place: int, version: Version) -> PayloadOutput:
        return PayloadOutput(
            place,
            version.name,
            version.uuid,
            version.version,
            "postgres",
            len(version.invalidations),
            None,
            f"postgres_table:staging_{self._task_id.hex}_{self._epoch}_{self._epoch}_{place}",
            version.written(),
        )


def stored_table(data_read_dsn: str, version: UUID, name: str) -> pa.Table:
    """The stored rows, in the shape of files and the order of the table."""
    schema, data = TABLES[ChainTable(name)], DataDatabase(data_read_dsn)
    try:
        stored = read_stored(data, version, schema.hot_arrow.names, 0, MAX_BLOCK)
    finally:
        data.close()
    if not stored.num_rows:
        return schema.arrow.empty_table()
    return schema.from_hot(stored).sort_by([(column, "ascending") for column in schema.sort_by])


def node_blocks(url: str, start: int, end: int) -> list[RawBlock]:
    """What the node says, asked once for all."""
    numbers = range(start, end + 1)
    blocks = rpc_batch(url, [("eth_getBlockByNumber", [hex(number), True]) for number in numbers])
    receipts = rpc_batch(url, [("eth_getBlockReceipts", [hex(number)]) for number in numbers])
    return [RawBlock(*each, None, "node") for each in zip(numbers, blocks, receipts, strict=True)]


def node_table(raw: Sequence[RawBlock], name: str, chain_id: int) -> pa.Table:
    """The table that these blocks make, in its order."""
    schema = TABLES[ChainTable(name)]
    if not raw:
        return schema.arrow.empty_table()
    decoded = pa.Table.from_batches([decode(raw, schema.dataset, chain_id)])
    return decoded.sort_by([(column, "ascending") for column in schema.sort_by])


def rpc_batch(url: str, calls: Sequence[tuple[str, list[Any]]]) -> list[Any]:
    if not calls:
        return []
    body = [
        {"jsonrpc": "2.0", "id": place, "method": method, "params": params}
        for place, (method, params) in enumerate(calls)
    ]
    request = urllib.request.Request(
        url, msgspec.json.encode(body), {"content-type": "application/json"}, method="POST"
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        found = {each["id"]: each for each in msgspec.json.decode(answer.read())}
    for each in found.values():
        assert "error" not in each, each["error"]
    return [found[place]["result"] for place in range(len(calls))]
