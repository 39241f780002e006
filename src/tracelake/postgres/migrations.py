"""The migration runner: numbered SQL files, applied once each, in order, under a lock.

Missing migrations are applied in one transaction: all of them, or none. There is no way down.

A database whose schema is newer than this code is refused: an old process must not write through
assumptions that no longer hold. The ledger keeps each file's hash, so an edited migration is noticed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from tracelake.domain.errors import Conflict
from tracelake.postgres import sqlfiles

if TYPE_CHECKING:
    import asyncpg

_SQL = sqlfiles.load("tracelake.postgres", "migrations.sql")
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
    """A schema as this code knows it: the files of ``package``, and the Postgres schema that has the ledger."""

    database: str
    package: str
    ledger_schema: str = "public"

    def migrations(self) -> tuple[Migration, ...]:
        return _migrations(self.package)

    async def migrate(
        self,
        connection: asyncpg.Connection[Any],
        *,
        adopt: Callable[[], Awaitable[tuple[int, ...]]] | None = None,
    ) -> list[str]:
        """Bring the database up to this code's version; returns the names of the migrations applied. ``adopt``
        returns the versions that were applied before there was a ledger; it is called under the lock."""
        known = self.migrations()
        # Outside of the transaction, since the lock below is on this table.
        await self._ensure_ledger(connection)
        async with connection.transaction():
            await self.lock(connection)
            # Read under the lock: another installer may have applied some while this one waited.
            applied = await self._applied(connection)
            if adopt is not None and not applied:
                await self._record(connection, _named(await adopt(), known))
                applied = await self._applied(connection)
            self._check(applied, known)
            pending = known[len(applied) :]
            for migration in pending:
                await connection.execute(migration.sql)
                # In the same transaction as its changes, so neither is ever there alone.
                await self._record(connection, [migration])
        return [migration.name for migration in pending]

    async def lock(self, connection: asyncpg.Connection[Any]) -> None:
        """Keep other installers away until the end of the transaction."""
        await connection.execute(await connection.fetchval(_SQL.lock, self.ledger_schema))

    async def check(self, pool: asyncpg.Pool[Any]) -> None:
        """``Conflict`` unless the database has exactly this code's schema; for processes that can't migrate it."""
        import asyncpg

        try:
            applied = await self._applied(pool)
        except (
            asyncpg.UndefinedTableError,
            asyncpg.InvalidSchemaNameError,
            # A ledger that the installer has made, and not yet granted.
            asyncpg.InsufficientPrivilegeError,
        ):
            applied = []
        known = self.migrations()
        self._check(applied, known)
        if len(applied) < len(known):
            raise Conflict(
                "SchemaTooOld",
                f"the {self.database} database has schema version {len(applied)}, this version of tracelake needs "
                f"{len(known)}: install it first",
            )

    async def _ensure_ledger(self, connection: asyncpg.Connection[Any]) -> None:
        """Create the table. Before, there is nothing to lock: of two processes at once, one finds it created."""
        import asyncpg

        # How the later one fails depends on how far it came: its look at the names, its entry in the catalog, or
        # the table's row type, which Postgres looks for after the table.
        lost_race = (
            asyncpg.UniqueViolationError,
            asyncpg.DuplicateSchemaError,
            asyncpg.DuplicateTableError,
            asyncpg.DuplicateObjectError,
        )
        # The schema and the table are two races, and each can be lost once.
        for last in (False, False, True):
            try:
                await connection.execute(await connection.fetchval(_SQL.ledger, self.ledger_schema))
                return
            except lost_race:
                if last:
                    raise

    async def _applied(
        self, connection: asyncpg.Connection[Any] | asyncpg.Pool[Any]
    ) -> list[tuple[int, str, str]]:
        rows = await connection.fetch(await connection.fetchval(_SQL.applied, self.ledger_schema))
        return [(row["version"], row["name"], row["sha256"]) for row in rows]

    async def _record(self, connection: asyncpg.Connection[Any], migrations: list[Migration]) -> None:
        for migration in migrations:
            entry = (migration.version, migration.name, migration.sha256)
            await connection.execute(await connection.fetchval(_SQL.record, self.ledger_schema, *entry))

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


@cache
def _migrations(package: str) -> tuple[Migration, ...]:
    found = sorted(
        (
            Migration(int(match[1]), entry.name, entry.read_text(encoding="utf-8"))
            for entry in resources.files(package).iterdir()
            if (match := _FILE.match(entry.name))
        ),
        key=lambda migration: migration.version,
    )
    versions = [migration.version for migration in found]
    if versions != list(range(1, len(found) + 1)):
        raise RuntimeError(f"the migrations of {package} are not numbered from 1 without a gap: {versions}")
    return tuple(found)


def _named(versions: tuple[int, ...], known: tuple[Migration, ...]) -> list[Migration]:
    """A version that this code doesn't know gets an entry of its own, so that the check refuses it."""
    by_version = {migration.version: migration for migration in known}
    return [by_version.get(version, Migration(version, "unknown", "")) for version in versions]
