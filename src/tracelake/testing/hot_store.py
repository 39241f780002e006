"""pytest plugin: the data database as wrapper and operators see it, and what a test stages in it by hand.

``hot`` is the wrapper's side, ``operator`` the operators' one, by the logins of their tickets, ``admin`` a
connection that sees everything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest_asyncio

from tracelake import sqlfiles
from tracelake.domain.block_range import BlockRange
from tracelake.hot.commit import HotStore, StagedOutput, Writer
from tracelake.hot.install import WRITER_ROLE
from tracelake.hot.tickets import Holder, Ticket, Tickets
from tracelake.secret import Secret
from tracelake.testing.data_database import role_dsn

Connection: TypeAlias = "asyncpg.Connection[Any]"

_SQL = sqlfiles.load("tracelake.testing", "hot_store.sql")
VERSION = UUID("00000000-0000-4000-8000-0000000000aa")
SOURCE = UUID("00000000-0000-4000-8000-0000000000bb")
SCOPE = BlockRange(0, 9)


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
                Holder(task_id=who.task_id, attempt=who.epoch, epoch=who.epoch, reads=tuple(reads))
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
    """What is committed."""
    statement = await connection.fetchval(_SQL.read_table, VERSION)
    found = await connection.fetch(statement) if statement is not None else []
    return [(row["block_number"], row["value"]) for row in found]


async def staging_tables(connection: Connection) -> Sequence[str]:
    return [row["tablename"] for row in await connection.fetch(_SQL.staging_tables)]
