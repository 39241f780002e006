"""Sets up the queue in a database of its own, and the one role that may use it.

The role can log in to this database and read and write the queue's rows, and that is all: it owns
nothing, creates nothing, not even temporary tables, and is a member of nothing. What Postgres gives to
everybody (PUBLIC) is taken back in this database. The other databases of the cluster are not this
module's to close unasked: ``install`` answers which of them the role could still enter, and
``close_to_public`` closes them.

Installing again is safe: it migrates, renews the grants and sets the password given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from tracelake import scram, sqlfiles
from tracelake.queue.migrate import migrate
from tracelake.roles import change_roles, put_bare_role, strip_public_or_say

CONNECTIONS = 120
"""Of the role at once, for all workers and sinks together: one of them has up to five. ``ALTER DATABASE … SET
tracelake.guest_connections`` says another number."""
SETTINGS = frozenset({"idle_in_transaction_session_timeout=10s", "statement_timeout=60s"})
"""What the grants set for the role, as the catalogue of Postgres has it."""

_SQL = sqlfiles.load("tracelake.queue", "sql/install.sql")
_MIGRATE = sqlfiles.load("tracelake.queue", "sql/migrate.sql")


async def install(
    admin_dsn: str, known: Mapping[str, str] | None = None, *, role: str, password: str
) -> tuple[str, ...]:
    """Prepare the database of ``admin_dsn`` and the role; answers the other databases open to the role. ``known``
    has the role's verifier if it is one of this very password."""
    verifier = (known or {}).get(role) or scram.verifier(password)
    async with _connected(admin_dsn) as connection:
        await migrate(connection)

        async def put_role() -> None:
            await connection.execute(_MIGRATE.lock)
            await put_bare_role(connection, role, verifier, needed_by="the queue", connections=CONNECTIONS)
            await connection.execute(await connection.fetchval(_SQL.close_database))
            await connection.execute(_SQL.close_public_schema)
            await strip_public_or_say(connection)
            await connection.execute(await connection.fetchval(_SQL.let_notify, role))
            await connection.execute(await connection.fetchval(_SQL.grants, role))

        await change_roles(connection, put_role, dsn=admin_dsn, guests=(role,))
        return await open_databases(connection, role)


async def open_databases(connection: asyncpg.Connection[Any], role: str) -> tuple[str, ...]:
    """The other databases of the cluster that the role could enter."""
    return tuple(row["datname"] for row in await connection.fetch(_SQL.other_databases, role))


async def close_to_public(admin_dsn: str, databases: Sequence[str]) -> None:
    """Let only owners, superusers and roles with a grant of their own connect to these databases."""
    async with _connected(admin_dsn) as connection, connection.transaction():
        for database in databases:
            await connection.execute(await connection.fetchval(_SQL.close_to_public, database))


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(
        dsn, timeout=10, server_settings={"application_name": "tracelake-install"}
    )
    try:
        yield connection
    finally:
        await connection.close()
