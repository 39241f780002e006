"""Functions of the data database: applied from their files when these have changed, and only then."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import asyncpg
import pytest
import pytest_asyncio

from tests.support.databases import install_data
from tests.support.postgres import CloneDatabase
from tracelake.domain.errors import Conflict
from tracelake.hot import install as hot_install
from tracelake.hot import put_functions

CHANGED_SINCE_MIGRATIONS = frozenset({"tracelake.signal_rows"})
"""Functions, as ``schema.name``, whose files don't say, or no longer say, what the migrations before 0008 made."""
FUNCTIONS = """
SELECT p.oid::regprocedure::text AS name, pg_get_functiondef(p.oid) AS definition,
       p.proowner::regrole::text AS owner, p.proacl::text AS acl
FROM pg_proc p WHERE p.pronamespace IN ('tracelake'::regnamespace, 'staging'::regnamespace) ORDER BY 1
"""
ADDED = """
CREATE OR REPLACE FUNCTION staging.added() RETURNS int LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    RETURN 1;
END $$;
"""
ADDED_WITH_ARGUMENT = """
DROP FUNCTION IF EXISTS staging.added();
CREATE OR REPLACE FUNCTION staging.added(by int) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    RETURN by;
END $$;
"""
Connection: TypeAlias = "asyncpg.Connection[Any]"
SetFiles = Callable[..., None]


@pytest.fixture
def empty_dsn(clone_database: CloneDatabase) -> str:
    return clone_database("empty", lambda _dsn: None)


@pytest_asyncio.fixture
async def connection(empty_dsn: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(empty_dsn)
    yield connection
    await connection.close()


@pytest.fixture
def with_files(monkeypatch: pytest.MonkeyPatch) -> SetFiles:
    files = put_functions.function_files()

    def set_files(**more: str) -> None:
        changed = {f"{name}.sql": text for name, text in more.items()}
        monkeypatch.setattr(put_functions, "function_files", lambda: {**files, **changed})

    return set_files


async def functions(connection: Connection) -> dict[str, tuple[str, str, str]]:
    rows = await connection.fetch(FUNCTIONS)
    return {row["name"]: (row["definition"], row["owner"], row["acl"]) for row in rows}


def without_comments(function: tuple[str, str, str] | None) -> tuple[str, str, str] | None:
    """Comments may be reworded; a migration's text can't change with them."""
    if function is None:
        return None
    definition, owner, acl = function
    return re.sub(r"(?m)^ *-- .*\n| +-- .*$", "", definition), owner, acl


async def applied_sets(connection: Connection) -> int:
    return int(await connection.fetchval("SELECT count(*) FROM installation.function_set"))


async def test_files_define_what_migrations_made(
    empty_dsn: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave_them(_connection: Connection) -> bool:
        return False

    with monkeypatch.context() as without_files:
        without_files.setattr(hot_install, "put_functions", leave_them)
        await asyncio.to_thread(install_data, empty_dsn)
    made, applied = await functions(connection), await applied_sets(connection)
    await asyncio.to_thread(install_data, empty_dsn)
    defined = await functions(connection)
    assert (applied, await applied_sets(connection)) == (0, 1)
    assert len(defined) >= 39
    for name in {*made, *defined}:
        if name.partition("(")[0] not in CHANGED_SINCE_MIGRATIONS:
            assert without_comments(defined.get(name)) == without_comments(made.get(name))


async def test_every_function_is_in_a_file(empty_dsn: str, connection: Connection) -> None:
    """A function that only migrations define would stay as it is for ever."""
    await asyncio.to_thread(install_data, empty_dsn)
    text = "".join(put_functions.function_files().values())
    for name in await functions(connection):
        assert f"CREATE OR REPLACE FUNCTION {name.partition('(')[0]}(" in text


async def test_a_changed_file_is_applied_once(
    empty_dsn: str, connection: Connection, with_files: SetFiles
) -> None:
    await asyncio.to_thread(install_data, empty_dsn)
    before = await functions(connection)
    with_files(zz_added=ADDED)
    await asyncio.to_thread(install_data, empty_dsn)
    after = await functions(connection)
    definition, owner, acl = after.pop("staging.added()")
    assert after == before
    # Nothing that a definition leaves out is left open.
    assert "SET search_path TO 'pg_catalog', 'pg_temp'" in definition
    assert owner == "tracelake_staging"
    assert acl == "{tracelake_staging=X/tracelake_staging}"
    # A further install would undo this if it applied the files again.
    await connection.execute(ADDED.replace("RETURN 1", "RETURN 2"))
    await asyncio.to_thread(install_data, empty_dsn)
    assert await connection.fetchval("SELECT staging.added()") == 2
    assert await applied_sets(connection) == 2


async def test_a_changed_signature_leaves_no_other_function_behind(
    empty_dsn: str, connection: Connection, with_files: SetFiles
) -> None:
    with_files(zz_added=ADDED)
    await asyncio.to_thread(install_data, empty_dsn)
    with_files(zz_added=ADDED_WITH_ARGUMENT)
    await asyncio.to_thread(install_data, empty_dsn)
    assert [name for name in await functions(connection) if "added" in name] == ["staging.added(integer)"]


async def test_files_of_an_older_version_are_refused(
    empty_dsn: str, connection: Connection, with_files: SetFiles
) -> None:
    await asyncio.to_thread(install_data, empty_dsn)
    with_files(zz_added=ADDED)
    await asyncio.to_thread(install_data, empty_dsn)
    newer = await functions(connection)
    with_files()
    with pytest.raises(Conflict) as refused:
        await asyncio.to_thread(install_data, empty_dsn)
    assert refused.value.reason == "SchemaTooNew"
    assert await functions(connection) == newer


async def test_a_file_that_fails_changes_nothing(
    empty_dsn: str, connection: Connection, with_files: SetFiles
) -> None:
    await asyncio.to_thread(install_data, empty_dsn)
    before = await functions(connection)
    with_files(zz_added=ADDED, zz_broken="CREATE OR REPLACE FUNCTION staging.broken() RETURNS no_such_type")
    with pytest.raises(asyncpg.PostgresError):
        await asyncio.to_thread(install_data, empty_dsn)
    assert (await functions(connection), await applied_sets(connection)) == (before, 1)
