"""Sets up the queue in a Postgres database of its own, and the one role that may use it.

The role can log in to this database and read and write the queue's rows, and that is all: it owns
nothing, creates nothing, not even temporary tables, and is a member of nothing. Privileges that Postgres
grants to PUBLIC by default are revoked in this database. The other databases of the cluster are not this
module's to close unasked: ``install`` returns those that the role could still enter, and
``close_to_public`` closes them.

Installing again is safe: it migrates, renews the grants and sets the given password.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import asyncpg

from tracelake.postgres import scram, sqlfiles
from tracelake.postgres.migrations import Schema
from tracelake.postgres.roles import (
    SharedLogin,
    SharedLogins,
    change_roles,
    put_bare_role,
    strip_public_or_warn,
)
from tracelake.postgres.sessions import KeptSessions, connected
from tracelake.settings import Secret

QUEUE_ROLE = "tracelake_queue"
"""The login of workers and sinks to the queue's database; it has no other rights."""
CONNECTIONS = 120
"""Maximum sessions of the role, for all workers and sinks together; one process has up to five. ``ALTER DATABASE …
SET tracelake.guest_connections`` overrides it."""
SETTINGS = frozenset({"idle_in_transaction_session_timeout=10s", "statement_timeout=60s"})
"""Settings that the grants give the role, as the catalogue of Postgres has them."""
SCHEMA = Schema("queue", "tracelake.queue.migrations", ledger_schema="tracelake_queue")
"""The ledger is not in ``public``, which the queue's role can't use: the role reads it when a driver starts."""
_SQL = sqlfiles.load("tracelake.queue", "sql/install.sql")
_OPEN_BY_DEFAULT = ("postgres", "template1")
"""PUBLIC may connect to these two by default, and they hold no data of the platform."""
_connected = partial(connected, unavailable="QueueUnavailable", database="the queue's database")


def queue_logins(dsn: Secret, *, installation_id: str, password: Secret) -> SharedLogins:
    return SharedLogins(
        dsn=dsn,
        installation_id=installation_id,
        logins=(SharedLogin(role=QUEUE_ROLE, password=password, settings=SETTINGS),),
        install=partial(install, dsn.reveal(), role=QUEUE_ROLE, password=password.reveal()),
    )


async def take_login(owner_dsn: str, *, installation_id: str, password: Secret) -> tuple[str, ...]:
    """At a Dispatcher's start; returns databases that the role could enter although they aren't the queue's."""
    logins = queue_logins(Secret(owner_dsn), installation_id=installation_id, password=password)
    async with _connected(owner_dsn) as connection:
        await logins.take(connection)
        still_open = await open_databases(connection, QUEUE_ROLE)
    return tuple(name for name in still_open if name not in _OPEN_BY_DEFAULT)


async def restore_login(
    owner_dsn: str, sessions: KeptSessions, *, installation_id: str, password: Secret
) -> None:
    logins = queue_logins(Secret(owner_dsn), installation_id=installation_id, password=password)
    await logins.restore(await sessions.to(owner_dsn))


async def install(
    owner_dsn: str, known: Mapping[str, str] | None = None, *, role: str, password: str
) -> tuple[str, ...]:
    """Prepare the database of ``owner_dsn`` and the role; returns the other databases open to the role. ``known``
    has the role's verifier if that matches the password, so that it stays."""
    verifier = (known or {}).get(role) or scram.verifier(password)
    async with _connected(owner_dsn) as connection:
        await migrate(connection)

        async def put_role() -> None:
            # Several Dispatchers install at once when they start, and would change the same grants.
            await SCHEMA.lock(connection)
            await put_bare_role(connection, role, verifier, needed_by="the queue", connections=CONNECTIONS)
            await connection.execute(await connection.fetchval(_SQL.close_database))
            await connection.execute(_SQL.close_public_schema)
            # The rights of PUBLIC include the role's own to notify, so that is granted after this.
            await strip_public_or_warn(connection)
            await connection.execute(await connection.fetchval(_SQL.let_notify, role))
            await connection.execute(await connection.fetchval(_SQL.grants, role))

        await change_roles(connection, put_role, dsn=owner_dsn, guests=(role,))
        return await open_databases(connection, role)


async def migrate(connection: asyncpg.Connection[Any]) -> list[str]:
    """Bring the queue's schema to this code's version; returns the names of the migrations applied."""

    async def adopt() -> tuple[int, ...]:
        """The queue's first releases counted versions in a table of their own."""
        if not await connection.fetchval(_SQL.has_old_ledger):
            return ()
        await connection.execute(_SQL.lock_old_ledger)
        return tuple(row["version"] for row in await connection.fetch(_SQL.old_versions))

    return await SCHEMA.migrate(connection, adopt=adopt)


async def open_databases(connection: asyncpg.Connection[Any], role: str) -> tuple[str, ...]:
    """The other databases of the cluster that the role could enter."""
    return tuple(row["datname"] for row in await connection.fetch(_SQL.other_databases, role))


async def close_to_public(owner_dsn: str, databases: Sequence[str]) -> None:
    """Let only owners, superusers and roles with a grant of their own connect to these databases."""
    async with _connected(owner_dsn) as connection, connection.transaction():
        for database in databases:
            await connection.execute(await connection.fetchval(_SQL.close_to_public, database))
