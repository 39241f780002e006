"""A chain's tables as queries see them: hot rows that grow, files that a compaction commits, published names.

The Dispatcher's part is its real steps (``Conversation``), files and hot rows are real, and the Query Service's
part reads them by its own roles. A test decides what happens between two of its reads: ``hooks`` has a place
for each of a query's ``MOMENTS``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest_asyncio
from psycopg import sql

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tests.support.databases import ORG, PASSWORD, role_dsn
from tests.support.hot_scene import HotChain, rows_of
from tracelake.contracts.dispatcher_api import EventIn, OutputIn
from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.contracts.token_claims import TokenDataset
from tracelake.dispatcher.steps.context import StepContext
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.raw_block import ChainTable
from tracelake.hot.install import READER_ROLE
from tracelake.objects.directory import DirectoryStore
from tracelake.query.caller import QueryCaller, TaskCaller, UserCaller
from tracelake.query.catalog import Catalog, CatalogAnswer
from tracelake.query.engine.attach import AttachedRelation
from tracelake.query.engine.messages import RelationUse
from tracelake.query.hot_rows import HotDatabase, HotSnapshot
from tracelake.query.open_relation import RelationOpener
from tracelake.settings import Secret
from tracelake.store.query_roles import AUDIT_ROLE, CATALOG_ROLE, install_query_roles
from tracelake.tables.stored_types import schema_hash

SIZE = 10
DATASETS = (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.LOGS)
EVERYTHING = RelationUse()
MOMENTS = ("start", "first look", "snapshot", "second look", "end")
"""After which of a query's looks something may happen: before the first, after the first, and so on."""

_FOLLOWER = source(
    "follower",
    kind="always_on",
    operator="block_follower",
    outputs=3,
    config={"chain_id": 1, "rpc_pool": "main"},
)
_RANGES = reactive(
    "ranges",
    "follower",
    strategy="PerUpdate",
    runtime="dispatcher",
    operator="range_aggregator",
    outputs=1,
    config={"range_size": SIZE, "finality": "finalized"},
)
_COMPACT = reactive(
    "compact",
    "ranges",
    {"from": {"job": "follower", "output": 0}, "trigger": False},
    operator="parquet_compact",
    outputs=3,
)


def chain_dag(**compaction: Any) -> str:
    """``compaction`` is its config: another one makes another generation of files."""
    return dag(
        _FOLLOWER,
        _RANGES,
        {**_COMPACT, **({"config": compaction} if compaction else {})},
        reactive("reader", "ranges", {"from": {"job": "compact", "output": 2}, "trigger": False}),
        publish={
            **{
                name.value: {"from": {"job": "compact", "output": place}}
                for place, name in enumerate(DATASETS)
            },
            "hot_logs": {"from": {"job": "follower", "output": 2}},
            "ranges": {"from": {"job": "ranges", "output": 0}},
        },
    )


Happening = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class Hooks:
    """What happens once, when a query has come to a moment."""

    at: dict[str, list[Happening]] = field(default_factory=lambda: defaultdict(list))

    async def reach(self, moment: str) -> None:
        for happening in self.at.pop(moment, []):
            await happening()


class HookedCatalog(Catalog):
    hooks: Hooks
    looks = 0

    async def look(self, *args: Any, **fields: Any) -> CatalogAnswer:
        self.looks += 1
        found = await super().look(*args, **fields)
        await self.hooks.reach("first look" if self.looks == 1 else "second look")
        return found


class HookedDatabase(HotDatabase):
    hooks: Hooks

    @asynccontextmanager
    async def snapshot(self, seconds: float) -> AsyncIterator[HotSnapshot]:
        async with super().snapshot(seconds) as taken:
            await self.hooks.reach("snapshot")
            yield taken


class QueryScene:
    def __init__(self, ctx: StepContext, data_dsn: str, root: Path, catalog: HookedCatalog) -> None:
        self.talk = Conversation(ctx)
        self.root = root
        self.data_dsn = data_dsn
        self.catalog = catalog
        self.hooks = catalog.hooks = Hooks()
        self.hot_database = HookedDatabase(Secret(role_dsn(data_dsn, READER_ROLE)))
        self.hot_database.hooks = self.hooks
        self.opener = RelationOpener(catalog, self.hot_database, DirectoryStore(root))
        self.user = UserCaller(uuid4(), ORG, "user")
        self.chain = DevChain(seed=3, transactions_per_block=1, logs_per_transaction=2)
        self.hot: HotChain | None = None
        self.follower: Lease | None = None
        self._generations = 1

    async def deploy_chain(self) -> None:
        """A follower's three hot tables, without rows yet, and what compacts them."""
        await self.talk.deploy(chain_dag())
        self.follower = await self.talk.lease("follower")
        versions = [(await self.talk.output("follower", place))["dataset_version"] for place in range(3)]
        self.hot = HotChain(self.data_dsn, DATASETS, versions)
        self.let_read()

    async def replace_compaction(self) -> None:
        """A deploy after which the files are another generation's, of which there are none yet."""
        self._generations += 1
        await self.talk.deploy(chain_dag(blocks_per_file=SIZE * self._generations))

    def let_read(self) -> None:
        """Tables that the test made itself aren't the writer's, of which readers may read all."""
        with psycopg.connect(self.data_dsn) as admin:
            grant = sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA data TO {}")
            admin.execute(grant.format(sql.Identifier(READER_ROLE)))

    async def grow(self, blocks: int) -> None:
        """The chain gets longer, the follower stores it and says so; all but the last two blocks are final."""
        assert self.hot is not None
        assert self.follower is not None
        first = 0 if self.chain.head == 0 else self.chain.head + 1
        self.hot.store(self.chain, first, self.chain.mine(blocks))
        await self._announce_cursor()

    async def _announce_cursor(self) -> None:
        assert self.follower is not None
        head = self.chain.head
        events = [
            EventIn(await self.talk.dataset("follower", place), cursor=head, finalized=head - 2)
            for place in range(3)
        ]
        await self.talk.emit(self.follower, *events)
        if await self.talk.queued("ranges"):
            ranges = await self.talk.lease("ranges")
            await self.talk.complete(ranges, events=await self._whole_ranges())

    async def _whole_ranges(self) -> list[EventIn]:
        uuid = await self.talk.dataset("ranges")
        known = {start for start, _ in await self.talk.scopes("ranges")}
        starts = range(0, self.chain.head - 2 - SIZE + 2, SIZE)
        return [EventIn(uuid, start=at, end=at + SIZE - 1) for at in starts if at not in known]

    async def compact(self, many: int = 100) -> list[tuple[int, int]]:
        """Files for what waits to be compacted, oldest first, committed by the completion."""
        done = []
        for task in (await self.talk.queued("compact"))[:many]:
            lease = await self.talk.lease(task)
            start, end = lease.read.start, lease.read.end
            assert isinstance(start, int)
            assert isinstance(end, int)
            outputs = [
                self.write(lease, place, rows_of(self.chain, name, start, end), start, end)
                for place, name in enumerate(DATASETS)
            ]
            await self.talk.complete(lease, *outputs)
            done.append((start, end))
        return done

    def write(
        self, lease: Lease, place: int, rows: pa.Table, start: int, end: int, **blocks: Any
    ) -> OutputIn:
        """An output's one file, where the attempt may write, and what a completion says of it."""
        output = lease.payload.outputs[place]
        assert output.staging is not None
        folder = Path(output.staging.removeprefix("file://")) / "part"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{output.name}_{start}_{end}.parquet"
        pq.write_table(rows, path)
        numbers = rows.column("block_number").to_pylist() if "block_number" in rows.column_names else []
        span = {"min_block": min(numbers), "max_block": max(numbers)} if numbers else {}
        file = ManifestFile(
            location=f"file://{path}",
            rows=rows.num_rows,
            bytes=path.stat().st_size,
            content_hash=f"sha256:{sha256(path.read_bytes()).hexdigest()}",
            **(blocks or span),
        )
        manifest = Manifest(files=(file,), schema_hash=schema_hash(rows.schema))
        return OutputIn(
            place, start=start, end=end, row_count=rows.num_rows, location=output.staging, manifest=manifest
        )

    def reorg(self, depth: int) -> int:
        """The last blocks become others, in the chain and in the hot tables; answers the first of them."""
        assert self.hot is not None
        self.chain.reorg(depth)
        first = self.chain.head - depth + 1
        self.hot.store(self.chain, first, self.chain.head)
        return first

    async def announce_invalidation(self, first: int) -> None:
        """What the follower's data outbox brings to the Dispatcher after such a commit."""
        assert self.follower is not None
        for place in range(3):
            uuid = await self.talk.dataset("follower", place)
            await self.talk.emit(
                self.follower, taken_back(uuid, first, self.chain.head, key=str(uuid4()), reason="reorg")
            )
        await self._announce_cursor()

    def rows(self, dataset: ChainTable, start: int = 0, end: int | None = None) -> pa.Table:
        return rows_of(self.chain, dataset, start, self.chain.head if end is None else end)

    async def task_caller(self, job: str) -> tuple[TaskCaller, Lease]:
        """An attempt of the job's only queued task, as its token shows it."""
        lease = await self.talk.lease(job)
        datasets = tuple(
            TokenDataset(dataset_uuid=one.dataset_uuid, dataset_version=one.dataset_version, name=one.dataset)
            for one in lease.payload.inputs
        )
        return TaskCaller(lease.task_id, lease.attempt, ORG, datasets), lease

    async def query(
        self, name: str, use: RelationUse = EVERYTHING, caller: QueryCaller | None = None
    ) -> pa.Table:
        """All rows that a query of one relation is given, in the relation's columns."""
        self.catalog.looks = 0
        await self.hooks.reach("start")
        async with self.opener.open(caller or self.user, {name: use}, seconds=20) as opened:
            await self.hooks.reach("end")
            [relation] = opened.relations
            return content(relation)

    async def close(self) -> None:
        if self.hot is not None:
            self.hot.close()
        await self.hot_database.close()
        await self.catalog.close()


def content(relation: AttachedRelation) -> pa.Table:
    """What the engine makes of the descriptors: columns by name, NULL where a part lacks one."""
    parts = []
    for descriptor in relation.files:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            parts.append(pq.read_table(file))
    for descriptor in relation.tables:
        with pa.memory_map(f"/proc/self/fd/{descriptor}") as memory:
            parts.append(pa.ipc.open_stream(memory).read_all())
    whole = [_filled(part, relation.columns) for part in parts]
    return pa.concat_tables(whole) if whole else relation.columns.empty_table()


def _filled(part: pa.Table, columns: pa.Schema) -> pa.Table:
    return pa.table(
        [
            part.column(one.name) if one.name in part.column_names else pa.nulls(part.num_rows, one.type)
            for one in columns
        ],
        schema=columns,
    )


async def install_roles(state_dsn: str) -> None:
    connection = await asyncpg.connect(state_dsn)
    try:
        await install_query_roles(
            connection, dsn=Secret(state_dsn), catalog_password=PASSWORD, audit_password=PASSWORD
        )
    finally:
        await connection.close()


@pytest_asyncio.fixture
async def catalog_dsn(state_dsn: str) -> str:
    """The state database by the role that reads the catalog."""
    await install_roles(state_dsn)
    return role_dsn(state_dsn, CATALOG_ROLE)


@pytest_asyncio.fixture
async def audit_dsn(state_dsn: str) -> str:
    """The same by the role that adds audit rows."""
    await install_roles(state_dsn)
    return role_dsn(state_dsn, AUDIT_ROLE)


@pytest_asyncio.fixture
async def query_scene(
    ctx: StepContext, catalog_dsn: str, data_dsn: str, tmp_path: Path
) -> AsyncIterator[QueryScene]:
    catalog = await HookedCatalog.open(Secret(catalog_dsn))
    assert isinstance(catalog, HookedCatalog)
    scene = QueryScene(ctx, data_dsn, tmp_path / "objects", catalog)
    yield scene
    await scene.close()
