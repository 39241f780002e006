"""Migrations of the state database: forward only, once each, under a lock, and refused when in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from tracelake.domain.errors import Conflict
from tracelake.store.migrate import Migration, migrate, migrations
from tracelake.testing.postgres import CloneDatabase


@pytest.fixture
def empty_dsn(clone_database: CloneDatabase) -> str:
    return clone_database("empty", lambda dsn: None)


@pytest_asyncio.fixture
async def connection(empty_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(empty_dsn)
    yield connection
    await connection.close()


async def ledger(connection: asyncpg.Connection) -> list[tuple[int, str, str]]:
    rows = await connection.fetch("SELECT version, name, sha256 FROM schema_migration ORDER BY version")
    return [(row["version"], row["name"], row["sha256"]) for row in rows]


async def test_every_migration_is_applied_once(connection: asyncpg.Connection) -> None:
    names = [migration.name for migration in migrations()]
    assert await migrate(connection) == names
    assert await migrate(connection) == []
    assert await ledger(connection) == [(m.version, m.name, m.sha256) for m in migrations()]
    assert await connection.fetchval("SELECT count(*) FROM task") == 0


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [migration.version for migration in migrations()] == list(range(1, len(migrations()) + 1))


async def test_what_was_there_before_a_migration_is_there_after_it(
    connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts that a Dispatcher of the first schema had running go on under the next one."""
    known = migrations()
    for applied in range(1, len(known) + 1):
        with monkeypatch.context() as older:
            older.setattr("tracelake.migrations.Schema.migrations", lambda _, n=applied: known[:n])
            await migrate(connection)
        if applied == 1:
            await connection.execute(
                "INSERT INTO attempt (task_id, attempt, worker_id, lease_token, epoch, claimed_at) "
                "VALUES (gen_random_uuid(), 1, 'w', gen_random_uuid(), 1, tl_now())"
            )
    assert [m.name for m in known] == [name for _, name, _ in await ledger(connection)]
    assert await connection.fetchval("SELECT count(*) FROM attempt WHERE progress IS NULL") == 1


async def test_two_processes_at_once_apply_each_migration_once(
    empty_dsn: str, connection: asyncpg.Connection
) -> None:
    other = await asyncpg.connect(empty_dsn)
    try:
        applied = await asyncio.gather(migrate(connection), migrate(other))
    finally:
        await other.close()
    assert sorted(applied, key=len) == [[], [migration.name for migration in migrations()]]
    assert len(await ledger(connection)) == len(migrations())


async def test_a_second_process_waits_for_the_first(empty_dsn: str, connection: asyncpg.Connection) -> None:
    """The lock is held by a session that died with its work half done: the next one does it whole."""
    holder = await asyncpg.connect(empty_dsn)
    await holder.execute("BEGIN; CREATE TABLE schema_migration (version int)")
    waiting = asyncio.ensure_future(migrate(connection))
    pid = connection.get_server_pid()
    async with asyncio.timeout(10):
        while not await holder.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid):
            await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    holder.terminate()
    assert await waiting == [migration.name for migration in migrations()]


async def test_a_newer_schema_is_refused_with_a_way_out(connection: asyncpg.Connection) -> None:
    await migrate(connection)
    newer = len(migrations()) + 1
    await connection.execute(
        "INSERT INTO schema_migration (version, name, sha256) VALUES ($1, 'from_the_future.sql', 'x')", newer
    )
    with pytest.raises(Conflict) as refused:
        await migrate(connection)
    assert refused.value.reason == "SchemaTooNew"
    for word in (f"version {newer}", "from_the_future.sql", "upgrade tracelake"):
        assert word in refused.value.message
    assert await connection.fetchval("SELECT count(*) FROM schema_migration") == newer


async def test_a_migration_edited_after_it_was_applied_is_noticed(connection: asyncpg.Connection) -> None:
    await migrate(connection)
    await connection.execute("UPDATE schema_migration SET sha256 = 'another' WHERE version = 1")
    with pytest.raises(Conflict) as refused:
        await migrate(connection)
    assert refused.value.reason == "SchemaDiffers"
    assert migrations()[0].name in refused.value.message


async def test_a_refusal_leaves_no_lock_behind(empty_dsn: str, connection: asyncpg.Connection) -> None:
    await migrate(connection)
    await connection.execute("UPDATE schema_migration SET sha256 = 'another' WHERE version = 1")
    with pytest.raises(Conflict):
        await migrate(connection)
    await connection.execute(
        "UPDATE schema_migration SET sha256 = $1 WHERE version = 1", migrations()[0].sha256
    )
    other = await asyncpg.connect(empty_dsn)
    try:
        async with asyncio.timeout(10):
            assert await migrate(other) == []
    finally:
        await other.close()


async def test_a_migration_that_fails_changes_nothing(
    connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(connection)
    known = migrations()
    broken = Migration(len(known) + 1, "broken.sql", "CREATE TABLE half (n int); SELECT no_such_function()")
    monkeypatch.setattr("tracelake.migrations.Schema.migrations", lambda schema: (*known, broken))
    with pytest.raises(asyncpg.UndefinedFunctionError):
        await migrate(connection)
    assert await connection.fetchval("SELECT to_regclass('half')") is None
    assert len(await ledger(connection)) == len(known)
