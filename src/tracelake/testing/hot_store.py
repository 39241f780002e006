"""pytest plugin: the data database as its three roles see it, and what a test stages in it by hand.

``hot`` is the wrapper's side, ``operator`` a connection that may only stage, ``admin`` one that sees everything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest_asyncio

from tracelake import sqlfiles
from tracelake.domain.block_range import BlockRange
from tracelake.hot.commit import HotStore, StagedOutput, Writer
from tracelake.hot.install import STAGING_ROLE, WRITER_ROLE
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


@pytest_asyncio.fixture
async def operator(data_dsn: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(role_dsn(data_dsn, STAGING_ROLE))
    yield connection
    await connection.close()


@pytest_asyncio.fixture
async def admin(data_dsn: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(data_dsn)
    yield connection
    await connection.close()


def writer(epoch: int, task_id: UUID | None = None, revision: int = 0) -> Writer:
    return Writer(task_id=task_id or uuid4(), epoch=epoch, inputs={str(SOURCE): revision})


async def stage(
    operator: Connection, who: Writer, *blocks: int, value: str = "x", part: str | None = None
) -> tuple[str, int]:
    """Rows in the attempt's staging table, or in a further one; its name and how many they are."""
    middle, last = ("1", "0") if part is None else ("p", part)
    name = f"staging_{who.task_id.hex}_{middle}_{who.epoch}_{last}"
    await operator.execute(await operator.fetchval(_SQL.create_staging, name))
    records = [(block, value) for block in blocks]
    await operator.copy_records_to_table(name, schema_name="staging", records=records)
    return name, len(blocks)


def output_of(*tables: tuple[str, int], **fields: Any) -> StagedOutput:
    return StagedOutput(dataset_version=VERSION, tables=tables, **fields)


async def rows(connection: Connection) -> list[tuple[int, str]]:
    """What is committed."""
    statement = await connection.fetchval(_SQL.read_table, VERSION)
    found = await connection.fetch(statement) if statement is not None else []
    return [(row["block_number"], row["value"]) for row in found]


async def staging_tables(connection: Connection) -> Sequence[str]:
    return [row["tablename"] for row in await connection.fetch(_SQL.staging_tables)]
