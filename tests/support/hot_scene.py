"""Hot tables for tests: a dev chain's rows without a follower, staged rows by hand, and attempts without a
worker.

As a pytest plugin it gives ``hot``, the wrapper's side of the data database, ``operator``, the operators' side
by the logins of their tickets, and ``admin``, a connection that sees everything. ``HotScene`` runs attempts on
a real data database; the committer does what a context asks of its wrapper.

    scene = HotScene(data_dsn)
    ctx = scene.begin(an_input(start=0, end=9))
    ctx.outputs[0].stage(table)
    ctx.finish()
    scene.rows(ctx)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import msgspec
import orjson
import psycopg
import pyarrow as pa
import pytest
import pytest_asyncio
from psycopg import sql

from tests.support.databases import role_dsn
from tests.support.operator_process import a_task, an_output
from tracelake.contracts.dispatcher_api import EventIn, PayloadInput, PayloadOutput, TaskPayload
from tracelake.contracts.operator_protocol import Action, CommitRows
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.raw_block import ChainTable, RawBlock
from tracelake.evm.schemas import TABLES
from tracelake.hot.commit import HotStore, StagedOutput, Writer
from tracelake.hot.install import WRITER_ROLE
from tracelake.hot.tickets import Ticket, TicketHolder, Tickets
from tracelake.operators import Context
from tracelake.postgres import sqlfiles
from tracelake.settings import Secret
from tracelake.tables.postgres_csv import OPTIONS, encoded
from tracelake.worker.data_commit import DataCommitter

USUAL = (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.LOGS)
Connection: TypeAlias = "asyncpg.Connection[Any]"
_SQL = sqlfiles.load("tests.support", "hot_store.sql")
VERSION = UUID("00000000-0000-4000-8000-0000000000aa")
SOURCE = UUID("00000000-0000-4000-8000-0000000000bb")
SCOPE = BlockRange(0, 9)


def raw_blocks(chain: DevChain, start: int, end: int) -> list[RawBlock]:
    return [
        RawBlock(
            block.number,
            orjson.loads(block.with_transactions),
            [orjson.loads(receipt) for receipt in block.receipts],
            None,
            "dev",
        )
        for block in chain.blocks(start, end)
    ]


def rows_of(chain: DevChain, dataset: ChainTable, start: int, end: int) -> pa.Table:
    """What the chain says, in the shape of files."""
    return pa.Table.from_batches([decode(raw_blocks(chain, start, end), dataset, chain.chain_id)])


class HotChain:
    """Tables in the schema ``data`` of a database of the test's own, named as the platform names them."""

    def __init__(
        self, dsn: str, datasets: Sequence[ChainTable] = USUAL, versions: Sequence[UUID] | None = None
    ) -> None:
        self.dsn = dsn
        names = [uuid4() for _ in datasets] if versions is None else versions
        self.versions: dict[ChainTable, UUID] = dict(zip(datasets, names, strict=True))
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute("CREATE SCHEMA IF NOT EXISTS data")
        for dataset in datasets:
            columns = sql.SQL(", ").join(
                sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind))
                for name, kind in TABLES[dataset].postgres_types.items()
            )
            self._connection.execute(sql.SQL("CREATE TABLE {} ({})").format(self.table(dataset), columns))
            self._connection.execute(sql.SQL("CREATE INDEX ON {} (block_number)").format(self.table(dataset)))

    def table(self, dataset: ChainTable) -> sql.Identifier:
        return sql.Identifier("data", f"d_{self.versions[dataset].hex}")

    def store(self, chain: DevChain, start: int, end: int) -> None:
        """Replace these blocks by the chain's, in one transaction, as a follower does."""
        raw = raw_blocks(chain, start, end)
        with self._connection.transaction():
            for dataset in self.versions:
                self.delete(start, end, dataset)
                rows = pa.Table.from_batches([decode(raw, dataset, chain.chain_id)])
                statement = sql.SQL("COPY {} FROM STDIN ({})").format(self.table(dataset), sql.SQL(OPTIONS))
                with self._connection.cursor().copy(statement) as copy:
                    for piece in encoded(TABLES[dataset].to_hot(rows)):
                        copy.write(piece)

    def delete(self, start: int, end: int, *datasets: ChainTable) -> None:
        for dataset in datasets or tuple(self.versions):
            self.execute(dataset, "DELETE FROM {} WHERE block_number BETWEEN %s AND %s", start, end)

    def execute(self, dataset: ChainTable, statement: str, *arguments: object) -> None:
        """A statement about a table, which stands in it as ``{}``."""
        self._connection.execute(sql.SQL(statement).format(self.table(dataset)), arguments)

    def close(self) -> None:
        self._connection.close()


@pytest_asyncio.fixture
async def hot(data_dsn: str) -> AsyncIterator[HotStore]:
    store = HotStore(Secret(role_dsn(data_dsn, WRITER_ROLE)))
    yield store
    await store.close()


class Operators:
    """Attempts as the data database sees them: each has a ticket, and a connection by it."""

    def __init__(self, hot: HotStore) -> None:
        self.tickets = Tickets(hot)
        self._open: dict[tuple[UUID, int], tuple[Ticket, Connection]] = {}

    async def ticket(self, who: Writer, *reads: UUID) -> Ticket:
        return (await self._admitted(who, reads))[0]

    async def connection(self, who: Writer, *reads: UUID) -> Connection:
        return (await self._admitted(who, reads))[1]

    async def _admitted(self, who: Writer, reads: Sequence[UUID]) -> tuple[Ticket, Connection]:
        key = (who.task_id, who.epoch)
        if key not in self._open:
            ticket = await self.tickets.open(
                TicketHolder(task_id=who.task_id, attempt=who.epoch, epoch=who.epoch, reads=tuple(reads))
            )
            self._open[key] = ticket, await asyncpg.connect(ticket.dsn.reveal())
        return self._open[key]

    async def close(self) -> None:
        for ticket, connection in self._open.values():
            await connection.close(timeout=5)
            await self.tickets.close(ticket)


@pytest_asyncio.fixture
async def operator(hot: HotStore) -> AsyncIterator[Operators]:
    operators = Operators(hot)
    yield operators
    await operators.close()


@pytest_asyncio.fixture
async def admin(data_dsn: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(data_dsn)
    yield connection
    await connection.close()


def writer(epoch: int, task_id: UUID | None = None, revision: int = 0) -> Writer:
    return Writer(task_id=task_id or uuid4(), epoch=epoch, inputs={str(SOURCE): revision})


async def stage(
    operator: Operators, who: Writer, *blocks: int, value: str = "x", more: Sequence[str] = ()
) -> tuple[str, int]:
    """Rows in a staging table of the attempt; its name and how many they are. ``more`` columns have no values."""
    connection = await operator.connection(who)
    columns = [["block_number", "bigint"], ["value", "text"], *([name, "text"] for name in more)]
    name = await connection.fetchval(_SQL.open_table, msgspec.json.encode(columns).decode())
    records = [(block, value) for block in blocks]
    await connection.copy_records_to_table(
        name, schema_name="staging", columns=["block_number", "value"], records=records
    )
    return name, len(blocks)


def output_of(*tables: tuple[str, int], **fields: Any) -> StagedOutput:
    return StagedOutput(**{"dataset_version": VERSION, "output_index": 0, "tables": tables, **fields})


async def rows(connection: Connection) -> list[tuple[int, str]]:
    """The committed rows."""
    statement = await connection.fetchval(_SQL.read_table, VERSION)
    found = await connection.fetch(statement) if statement is not None else []
    return [(row["block_number"], row["value"]) for row in found]


async def staging_tables(connection: Connection) -> Sequence[str]:
    return [row["tablename"] for row in await connection.fetch(_SQL.staging_tables)]


class Wrapper:
    """Commits staged rows as the worker's wrapper does; ``sent`` are the events for the Dispatcher."""

    canceled = paused = False

    def __init__(self, dsn: str, task: TaskPayload, spark: Any = None) -> None:
        self._dsn, self._task, self._spark = dsn, task, spark
        self.sent: list[EventIn] = []
        self.wishes: list[CommitRows] = []
        self.ticket: Ticket | None = asyncio.run(self._with_committer(None))

    def call(self, action: Action) -> Any:
        if not isinstance(action, CommitRows):
            raise Invalid("NotHere", f"nobody answers {type(action).__name__}")
        self.wishes.append(action)
        return asyncio.run(self._with_committer(action))

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> Any:
        return self._spark

    def end(self) -> None:
        """The attempt is over: its ticket is closed."""
        if self.ticket is not None:
            asyncio.run(self._close(self.ticket))
            self.ticket = None

    async def _close(self, ticket: Ticket) -> None:
        store = HotStore(Secret(role_dsn(self._dsn, WRITER_ROLE)))
        try:
            await Tickets(store).close(ticket)
        finally:
            await store.close()

    async def _with_committer(self, wish: CommitRows | None) -> Any:
        async def say(events: Sequence[EventIn]) -> None:
            self.sent += events

        committer = DataCommitter(HotStore(Secret(role_dsn(self._dsn, WRITER_ROLE))))
        try:
            if wish is None:
                await committer.begin(self._task, say)
                return await committer.admit(self._task)
            return msgspec.to_builtins(await committer.commit(self._task, wish, say))
        finally:
            await committer.close()


class HotScene:
    """Attempts of one task after another, on one data database."""

    def __init__(self, dsn: str, spark: Any = None) -> None:
        self.dsn = dsn
        self.spark = spark
        self.wrapper: Wrapper | None = None
        self._epoch = 0
        self._begun: list[tuple[Context, Wrapper]] = []

    def begin(
        self,
        *inputs: PayloadInput,
        versions: Sequence[UUID | None] = (None,),
        operator: str = "mine",
        task_id: UUID | None = None,
        **fields: Any,
    ) -> Context:
        """A new attempt with an output for each of the dataset ``versions``, new ones where they are None."""
        self._epoch += 1
        task_id = task_id or uuid4()
        outputs = [
            _output(version, f"postgres_table:staging_{task_id.hex}_1_{self._epoch}_{index}", index)
            for index, version in enumerate(versions)
        ]
        task = a_task(operator, inputs=inputs, outputs=outputs, task_id=task_id)
        task = msgspec.structs.replace(task, epoch=self._epoch, **fields)
        self.wrapper = wrapper = Wrapper(self.dsn, task, self.spark)
        ctx = Context(
            task, wrapper, data_ticket_dsn=None if wrapper.ticket is None else wrapper.ticket.dsn.reveal()
        )
        self._begun.append((ctx, wrapper))
        return ctx

    def end(self, ctx: Context) -> None:
        """End an attempt as the worker does, whatever its outcome."""
        ctx.close()
        for begun, wrapper in self._begun:
            if begun is ctx:
                wrapper.end()

    def rows(self, ctx: Context, output: int = 0) -> list[tuple[Any, ...]]:
        """The committed rows of an output, ordered by its first column."""
        table = f"d_{ctx.task.outputs[output].dataset_version.hex}"
        query = sql.SQL("TABLE {} ORDER BY 1").format(sql.Identifier("data", table))
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(query).fetchall()

    def staging_tables(self) -> list[str]:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = 'staging' ORDER BY 1"
        with psycopg.connect(self.dsn) as connection:
            return [row[0] for row in connection.execute(query).fetchall()]

    def close(self) -> None:
        for ctx, _ in self._begun:
            self.end(ctx)


def _output(version: UUID | None, staging: str, index: int) -> PayloadOutput:
    output = an_output(index, name=f"result_{index}", storage="postgres", staging=staging)
    return output if version is None else msgspec.structs.replace(output, dataset_version=version)


@pytest.fixture
def hot_scene(data_dsn: str) -> Iterator[HotScene]:
    scene = HotScene(data_dsn)
    yield scene
    scene.close()
