"""The queue's schema: numbered files, forward only, applied under a lock.

``migrate`` is for whoever owns the database; ``check_schema`` is what a driver asks before it starts. A
schema newer than the code is refused, since old code can't know what it would break.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

import asyncpg

from tracelake import sqlfiles
from tracelake.domain.errors import Conflict

_MIGRATIONS = sqlfiles.load("tracelake.queue", "sql/migrate.sql")
_FILE = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")


@cache
def schema_files() -> dict[int, str]:
    """Version → SQL, in order, without a gap."""
    found: dict[int, str] = {}
    folder = resources.files("tracelake.queue").joinpath("schema")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if match := _FILE.fullmatch(entry.name):
            found[int(match[1])] = entry.read_text(encoding="utf-8")
    if list(found) != list(range(1, len(found) + 1)):
        raise RuntimeError(f"the queue's schema files are not numbered from 1 without a gap: {list(found)}")
    return found


async def migrate(connection: asyncpg.Connection[Any]) -> int:
    """Bring the schema to this code's version; answers how many steps that took."""
    await _bootstrap(connection)
    async with connection.transaction():
        await connection.execute(_MIGRATIONS.lock)
        current = await connection.fetchval(_MIGRATIONS.version)
        _refuse_newer(current)
        steps = [(version, text) for version, text in schema_files().items() if version > current]
        for version, text in steps:
            await connection.execute(text)
            await connection.execute(_MIGRATIONS.record, version)
    return len(steps)


async def _bootstrap(connection: asyncpg.Connection[Any]) -> None:
    """Before there is a table, there is nothing to lock: of two who make it at once, one finds it made."""
    try:
        await connection.execute(_MIGRATIONS.bootstrap)
    except (asyncpg.UniqueViolationError, asyncpg.DuplicateTableError, asyncpg.DuplicateSchemaError):
        await connection.execute(_MIGRATIONS.bootstrap)


async def check_schema(pool: asyncpg.Pool[Any]) -> None:
    try:
        current = await pool.fetchval(_MIGRATIONS.version)
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        current = 0
    _refuse_newer(current)
    needed = len(schema_files())
    if current < needed:
        message = f"the queue's schema is at version {current}, this code needs {needed}: install it first"
        raise Conflict("SchemaTooOld", message)


def _refuse_newer(current: int) -> None:
    if current > len(schema_files()):
        raise Conflict(
            "SchemaTooNew",
            f"the queue's schema is at version {current}, this code knows up to {len(schema_files())}: "
            "run a newer release",
        )
