"""Forward-only migrations: numbered SQL files, applied once each, in order, under a lock.

Those that are missing are applied in one transaction: all of them, or none.

A database whose schema is newer than this code is refused: an old process must not write through
assumptions that no longer hold. Applied files are remembered by hash, so an edited one is noticed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from tracelake import sqlfiles
from tracelake.domain.errors import Conflict

if TYPE_CHECKING:
    import asyncpg

_SQL = sqlfiles.load("tracelake", "migrations.sql")
_FILE = re.compile(r"^(\d{4})_[a-z0-9_]+\.sql$")


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Schema:
    """A database's schema as this code knows it."""

    database: str
    package: str

    def migrations(self) -> tuple[Migration, ...]:
        found = [
            Migration(int(match[1]), entry.name, entry.read_text(encoding="utf-8"))
            for entry in resources.files(self.package).iterdir()
            if (match := _FILE.match(entry.name))
        ]
        return tuple(sorted(found, key=lambda migration: migration.version))

    async def migrate(self, connection: asyncpg.Connection[Any]) -> list[str]:
        """Bring the database up to this code's version; returns the names of what was applied."""
        known = self.migrations()
        await self._ensure_ledger(connection)
        async with connection.transaction():
            await connection.execute(_SQL.lock)
            rows = await connection.fetch(_SQL.applied)
            self._check([(row["version"], row["name"], row["sha256"]) for row in rows], known)
            pending = known[len(rows) :]
            for migration in pending:
                await connection.execute(migration.sql)
                await connection.execute(_SQL.record, migration.version, migration.name, migration.sha256)
        return [migration.name for migration in pending]

    async def _ensure_ledger(self, connection: asyncpg.Connection[Any]) -> None:
        """Before there is a table, there is nothing to lock: of two who make it at once, one finds it made."""
        import asyncpg

        try:
            await connection.execute(_SQL.ledger)
        except (asyncpg.UniqueViolationError, asyncpg.DuplicateTableError):
            await connection.execute(_SQL.ledger)

    def _check(self, applied: list[tuple[int, str, str]], known: tuple[Migration, ...]) -> None:
        if len(applied) > len(known):
            raise Conflict(
                "SchemaTooNew",
                f"the {self.database} database has schema version {applied[-1][0]} ({applied[-1][1]}), "
                f"this version of tracelake knows only {len(known)}: upgrade tracelake or restore a backup",
            )
        for (version, name, sha256), migration in zip(applied, known, strict=False):
            if (version, sha256) != (migration.version, migration.sha256):
                raise Conflict(
                    "SchemaDiffers",
                    f"migration {name} was applied to the {self.database} database in another form "
                    "than it has here",
                )
