"""Migrations of the state database: forward only, once each, under a lock, and refused when in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from tests.support.postgres import CloneDatabase
from tracelake.domain.errors import Conflict
from tracelake.postgres.migrations import Migration
from tracelake.store.installation import migrate, migrations

PAUSED_JOBS = """
INSERT INTO org (org_id, name) VALUES (gen_random_uuid(), 'default');
INSERT INTO job (job_id, org_id, dag_name, name, fingerprint, active, activation, operator, config,
                 update_strategy, unique_key, secrets, trigger_count, runtime, max_attempts, timeout_seconds,
                 heartbeat_timeout_seconds, priority, retry_base_seconds, retry_max_seconds, paused)
SELECT gen_random_uuid(), org_id, 'chain', j.name, 'f', true, 'source', 'noop', '{}', 'replace', '{}', '{}', 0,
       'dispatcher', 1, 1, 1, 'normal', 1, 1, j.paused
FROM org, (VALUES ('ours', true), ('running', false), ('unknown', true)) AS j(name, paused);
INSERT INTO audit (org_id, actor, action, subject, at)
SELECT org_id, a.actor, a.action, '{"job": "chain/ours"}', a.at
FROM org, (VALUES ('eve', 'pause', timestamptz '2026-01-01'),
                   ('ada', 'pause', '2026-01-02')) AS a(actor, action, at);
"""


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
            older.setattr("tracelake.postgres.migrations.Schema.migrations", lambda _, n=applied: known[:n])
            await migrate(connection)
        if applied == 1:
            await connection.execute(
                "INSERT INTO attempt (task_id, attempt, worker_id, lease_token, epoch, claimed_at) "
                "VALUES (gen_random_uuid(), 1, 'w', gen_random_uuid(), 1, tl_now())"
            )
    assert [m.name for m in known] == [name for _, name, _ in await ledger(connection)]
    assert await connection.fetchval("SELECT count(*) FROM attempt WHERE progress IS NULL") == 1


async def test_jobs_that_a_person_had_paused_keep_that_cause(
    connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations()
    with monkeypatch.context() as older:
        older.setattr("tracelake.postgres.migrations.Schema.migrations", lambda _: known[:8])
        await migrate(connection)
    await connection.execute(PAUSED_JOBS)
    await migrate(connection)
    rows = await connection.fetch(
        "SELECT name, cause, actor, since = '2026-01-02' AS then "
        "FROM job_pause JOIN job USING (job_id) ORDER BY name"
    )
    assert [tuple(row) for row in rows] == [
        ("ours", "person", "ada", True),
        ("unknown", "person", None, False),
    ]


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


class LosesRaces:
    """A connection whose first statements meet another process's at the places that ``answers`` name: a real race
    ends in each of them, but too seldom for a test."""

    def __init__(self, connection: asyncpg.Connection, answers: list[type[asyncpg.PostgresError]]) -> None:
        self._connection = connection
        self._answers = answers

    async def execute(self, statement: str) -> str:
        if self._answers:
            raise self._answers.pop(0)("already exists")
        return await self._connection.execute(statement)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


@pytest.mark.parametrize(
    "answers",
    [
        [asyncpg.UniqueViolationError],
        [asyncpg.DuplicateTableError],
        [asyncpg.DuplicateObjectError],  # the table's row type
        [asyncpg.DuplicateSchemaError, asyncpg.DuplicateObjectError],
    ],
    ids=lambda answers: "_".join(answer.__name__ for answer in answers),
)
async def test_a_process_that_loses_the_race_for_the_ledger_goes_on(
    connection: asyncpg.Connection, answers: list[type[asyncpg.PostgresError]]
) -> None:
    assert await migrate(LosesRaces(connection, answers)) == [m.name for m in migrations()]


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
    monkeypatch.setattr("tracelake.postgres.migrations.Schema.migrations", lambda schema: (*known, broken))
    with pytest.raises(asyncpg.UndefinedFunctionError):
        await migrate(connection)
    assert await connection.fetchval("SELECT to_regclass('half')") is None
    assert len(await ledger(connection)) == len(known)
