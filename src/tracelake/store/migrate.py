"""Forward-only migrations: numbered SQL files, applied once each, in order, under a lock.

A database whose schema is newer than this code is refused: an old process must not write through
assumptions that no longer hold. Applied files are remembered by hash, so an edited one is noticed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources

import asyncpg

from tracelake.domain.errors import Conflict

_LOCK = 8_600_001
_FILE = re.compile(r"^(\d{4})_[a-z0-9_]+\.sql$")
_LEDGER = """
CREATE TABLE IF NOT EXISTS schema_migration (
    version int PRIMARY KEY, name text NOT NULL, sha256 text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)"""


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations() -> tuple[Migration, ...]:
    found = [
        Migration(int(match[1]), entry.name, entry.read_text(encoding="utf-8"))
        for entry in resources.files("tracelake.store.migrations").iterdir()
        if (match := _FILE.match(entry.name))
    ]
    return tuple(sorted(found, key=lambda migration: migration.version))


async def migrate(connection: asyncpg.Connection) -> list[str]:
    """Bring the schema up to this code's version; returns the names of what was applied."""
    known = migrations()
    await connection.execute("SELECT pg_advisory_lock($1)", _LOCK)
    try:
        await connection.execute(_LEDGER)
        rows = await connection.fetch("SELECT version, name, sha256 FROM schema_migration ORDER BY version")
        _check([(row["version"], row["name"], row["sha256"]) for row in rows], known)
        pending = known[len(rows) :]
        for migration in pending:
            async with connection.transaction():
                await connection.execute(migration.sql)
                await connection.execute(
                    "INSERT INTO schema_migration (version, name, sha256) VALUES ($1, $2, $3)",
                    migration.version,
                    migration.name,
                    migration.sha256,
                )
        return [migration.name for migration in pending]
    finally:
        await connection.execute("SELECT pg_advisory_unlock($1)", _LOCK)


def _check(applied: list[tuple[int, str, str]], known: tuple[Migration, ...]) -> None:
    if len(applied) > len(known):
        raise Conflict(
            "SchemaTooNew",
            f"the state database has schema version {applied[-1][0]} ({applied[-1][1]}), "
            f"this version of tracelake knows only {len(known)}: upgrade tracelake or restore a backup",
        )
    for (version, name, sha256), migration in zip(applied, known, strict=False):
        if (version, sha256) != (migration.version, migration.sha256):
            raise Conflict(
                "SchemaDiffers",
                f"migration {name} was applied to the state database in another form than it has here",
            )
