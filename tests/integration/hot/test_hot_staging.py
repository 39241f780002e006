"""Staged rows: a commit takes exactly those that were reported, whoever crashes, repeats or goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from tests.support.databases import install_data, role_dsn
from tests.support.hot_scene import (
    SCOPE,
    VERSION,
    Connection,
    Operators,
    output_of,
    rows,
    stage,
    staging_tables,
    writer,
)
from tracelake.domain.errors import Unavailable
from tracelake.embedded.postgres import Cluster
from tracelake.hot.commit import HotStore
from tracelake.hot.install import WRITER_ROLE
from tracelake.settings import Secret

LATE = "INSERT INTO staging.{} VALUES (2, 'late')"


async def test_staged_rows_that_became_fewer_or_more_are_never_committed(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who = writer(1)
    await hot.begin(who, VERSION, SCOPE)
    await hot.commit(who, [output_of(await stage(operator, who, 1))], SCOPE, [])
    name, count = await stage(operator, who, 2, 3)
    for statement in (
        "DELETE FROM staging.{} WHERE block_number = 3",
        "INSERT INTO staging.{} SELECT 4 FROM generate_series(1, 2)",
        "DROP TABLE staging.{}",
    ):
        await admin.execute(statement.format(name))
        with pytest.raises(Unavailable) as refused:
            await hot.commit(who, [output_of((name, count))], SCOPE, [])
        assert refused.value.reason == "StagedRowsLost"
    assert await rows(admin) == [(1, "x")]


async def test_nobody_adds_rows_to_what_is_being_committed(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    """A load that is under way is waited for, and then the count no longer holds."""
    who = writer(1)
    await hot.begin(who, VERSION, SCOPE)
    staged = await stage(operator, who, 1)
    connection = await operator.connection(who)
    loading = connection.transaction()
    await loading.start()
    await connection.execute(LATE.format(staged[0]))
    committing = asyncio.create_task(hot.commit(who, [output_of(staged)], SCOPE, []))
    async with asyncio.timeout(10):
        while not await admin.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            await asyncio.wait([committing], timeout=0.01)
    await loading.commit()
    with pytest.raises(Unavailable, match="1 rows were staged"):
        await committing
    assert await rows(admin) == []


async def test_what_an_earlier_attempt_is_still_loading_keeps_nobody_from_beginning(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    task_id = uuid4()
    old, new = writer(1, task_id), writer(2, task_id)
    name, _ = await stage(operator, old, 1)
    connection = await operator.connection(old)
    await connection.execute("BEGIN")
    await connection.execute(LATE.format(name))
    async with asyncio.timeout(10):
        await hot.begin(new, VERSION, SCOPE)
        await operator.ticket(new)
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, ConnectionError)):
        await connection.execute(LATE.format(name))
    await operator.tickets.sweep()
    assert await staging_tables(admin) == []


async def test_rows_that_a_crash_of_the_database_has_emptied_are_not_taken_for_none(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "data", name="data")
    cluster.start()
    try:
        await asyncio.to_thread(install_data, cluster.dsn())
        who = writer(1)
        hot = HotStore(Secret(role_dsn(cluster.dsn(), WRITER_ROLE)))
        operator = Operators(hot)
        await hot.begin(who, VERSION, SCOPE)
        first, second = [await stage(operator, who, 1) for _ in range(2)]
        await hot.commit(who, [output_of(first)], SCOPE, [])
        assert cluster.pid is not None
        os.kill(cluster.pid, signal.SIGQUIT)
        await asyncio.to_thread(cluster.stop)
        cluster.start()
        with pytest.raises(Unavailable) as refused:
            await hot.commit(who, [output_of(second)], SCOPE, [])
        if refused.value.reason != "StagedRowsLost":
            with pytest.raises(Unavailable, match="1 rows were staged"):
                await hot.commit(who, [output_of(second)], SCOPE, [])
        look = await asyncpg.connect(cluster.dsn())
        assert await rows(look) == [(1, "x")]
        await look.close()
        await hot.close()
    finally:
        cluster.stop()
