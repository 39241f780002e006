"""Sets up the data database and its roles: one owns staging tables, one commits them, one reads.

The first one can't log in; the other two are for trusted processes. Operators get neither: each attempt has a
login of its own, which the writer asks functions of this database for (``tracelake.open_ticket``). These
functions make roles with the rights of the installing role, which must therefore be allowed to create roles.

Passwords of the two logins belong to the database (schema ``installation``): the first install stores them, later
ones, from any home, use the stored ones. Installing again is safe: it migrates, applies changed functions, and
renews grants and passwords.

``forget_fences`` is for a restore of either database, before a worker uses it. Fences name epochs and revisions
of inputs that the restored state database may not have; one that is ahead of it would keep every attempt away
from its blocks. Without fences, attempts from before the restore commit nothing, and new attempts write new
fences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import asyncpg

from tracelake.domain.errors import Conflict
from tracelake.hot.put_functions import put_functions
from tracelake.postgres import scram, sqlfiles
from tracelake.postgres.dsn import with_login
from tracelake.postgres.migrations import Schema
from tracelake.postgres.roles import act_as, change_roles, strip_public
from tracelake.postgres.sessions import connected
from tracelake.settings import Secret

STAGING_ROLE = "tracelake_staging"
WRITER_ROLE = "tracelake_writer"
READER_ROLE = "tracelake_reader"
_ROLES = (STAGING_ROLE, WRITER_ROLE, READER_ROLE)
_SETTINGS = {
    WRITER_ROLE: {"idle_in_transaction_session_timeout=10s"},
    READER_ROLE: {
        "search_path=data",
        "default_transaction_read_only=on",
        "statement_timeout=5min",
        "idle_in_transaction_session_timeout=5min",
    },
}
"""Settings of the roles in this database, made by the grants; they have none elsewhere."""
_SQL = sqlfiles.load("tracelake.hot", "sql/install.sql")
_DATA = Schema("data", "tracelake.hot.migrations")
_RESTORED_SQL = sqlfiles.load("tracelake.hot", "sql/restored.sql")
_REFUSALS = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InsufficientPrivilegeError)
_connected = partial(connected, unavailable="DataUnavailable", database="the data database")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """``applied`` are the names of the migrations that were missing; the passwords are those that hold now.
    ``left_to_everybody`` are default rights of PUBLIC that the installer couldn't revoke."""

    applied: list[str]
    writer_password: Secret
    reader_password: Secret
    left_to_everybody: tuple[str, ...] = ()


async def install(
    owner_dsn: str, *, writer_password: Secret, reader_password: Secret, replace: bool = False
) -> Installed:
    """Prepare the database of ``owner_dsn``. The passwords given are for a database that has none yet, unless they
    are to ``replace`` those that it has."""
    async with _connected(owner_dsn) as connection:
        is_superuser = await _check_installer(connection)
        applied = await _DATA.migrate(connection)
        # The stored password wins, or an install from a second home would lock out the workers of the first.
        statement = _SQL.replace_login if replace else _SQL.keep_login
        writer_password = Secret(await connection.fetchval(statement, WRITER_ROLE, writer_password.reveal()))
        reader_password = Secret(await connection.fetchval(statement, READER_ROLE, reader_password.reveal()))

        left_to_everybody: tuple[str, ...] = ()

        async def put_roles() -> None:
            await _put_owner(connection, STAGING_ROLE)
            await _put_role(connection, WRITER_ROLE, writer_password)
            await _put_role(connection, READER_ROLE, reader_password)
            for role in _ROLES:
                await act_as(connection, role)

        async def put_grants() -> None:
            nonlocal left_to_everybody
            await connection.execute(_SQL.one_at_a_time)
            await put_functions(connection)
            await connection.execute(await connection.fetchval(_SQL.close_database))
            left_to_everybody = await strip_public(connection)
            # By default only a superuser can grant that role.
            # Without it attempts could use up all connections.
            if is_superuser:
                await connection.execute(await connection.fetchval(_SQL.reserve, WRITER_ROLE))
            await connection.execute(await connection.fetchval(_SQL.grants, STAGING_ROLE, WRITER_ROLE))
            await connection.execute(await connection.fetchval(_SQL.open_staging, STAGING_ROLE))
            await connection.execute(await connection.fetchval(_SQL.grant_reading, READER_ROLE, WRITER_ROLE))
            # PUBLIC may execute a new function until that is revoked.
            await connection.execute(_SQL.revoke_functions)
            await connection.execute(await connection.fetchval(_SQL.grant_functions, WRITER_ROLE))

        # Every attempt waits for the lock that the grants take, so the roles, which sessions of their own may hold
        # up, are changed before it.
        await change_roles(connection, put_roles, dsn=owner_dsn, guests=_ROLES)
        await change_roles(connection, put_grants, dsn=owner_dsn, guests=_ROLES)
        await connection.execute(_SQL.end_sessions, STAGING_ROLE)
        return Installed(
            applied=applied,
            writer_password=writer_password,
            reader_password=reader_password,
            left_to_everybody=left_to_everybody,
        )


async def open_databases(owner_dsn: str) -> list[str]:
    """The other databases of the server that an attempt's login could enter: each is open to PUBLIC until that is
    revoked. They aren't this module's to close unasked."""
    async with _connected(owner_dsn) as connection:
        return [row["datname"] for row in await connection.fetch(_SQL.open_databases)]


async def restore_roles(owner_dsn: str, *, writer_password: Secret, reader_password: Secret) -> list[str]:
    """Give those roles their passwords, settings and rights again that have other ones now, and return which they
    were: a role can't be kept from changing its own. Costs three logins when all is well."""
    passwords = {WRITER_ROLE: writer_password, READER_ROLE: reader_password}
    async with _connected(owner_dsn) as connection:
        changed = [
            role
            for role, password in passwords.items()
            if set(await connection.fetchval(_SQL.settings, role)) != _SETTINGS[role]
            or await _lacks_rights(connection, role)
            # Last, since it costs a login.
            or not await _gets_in(owner_dsn, role, password)
        ]

        async def put_roles() -> None:
            for role in changed:
                await _put_role(connection, role, passwords[role])
                await connection.execute(await connection.fetchval(_SQL.reset_settings, role))
            await connection.execute(await connection.fetchval(_SQL.grants, STAGING_ROLE, WRITER_ROLE))
            await connection.execute(await connection.fetchval(_SQL.grant_reading, READER_ROLE, WRITER_ROLE))

        if changed:
            await change_roles(connection, put_roles, dsn=owner_dsn, guests=_ROLES)
        return changed


async def _lacks_rights(connection: asyncpg.Connection[Any], role: str) -> bool:
    if role == WRITER_ROLE:
        return bool(await connection.fetchval(_SQL.lacks_writing, STAGING_ROLE, WRITER_ROLE))
    return bool(await connection.fetchval(_SQL.lacks_reading, READER_ROLE, WRITER_ROLE))


async def _check_installer(connection: asyncpg.Connection[Any]) -> bool:
    """Whether it is a superuser. ``Conflict`` when attempts couldn't have logins, or could leave locks behind."""
    found = await connection.fetchrow(_SQL.installer)
    assert found is not None
    if not found["makes_roles"]:
        raise Conflict(
            "CantMakeRoles",
            f"the role {found['name']!r} can't create roles, and every attempt that reads or writes hot tables "
            f"gets one of its own: let a superuser run ALTER ROLE {found['name']} CREATEROLE, and install again",
        )
    if found["prepared"]:
        raise Conflict(
            "PreparedTransactions",
            f"max_prepared_transactions is {found['prepared']}, so an operator could leave a transaction that "
            "keeps its locks for ever: set it to 0 on the data database's server, restart that, and install again",
        )
    return bool(found["is_superuser"])


async def _put_owner(connection: asyncpg.Connection[Any], role: str) -> None:
    exists = await connection.fetchval(_SQL.role_exists, role)
    statement = _SQL.change_owner if exists else _SQL.create_owner
    await connection.execute(await connection.fetchval(statement, role))


async def _put_role(connection: asyncpg.Connection[Any], role: str, password: Secret) -> None:
    exists = await connection.fetchval(_SQL.role_exists, role)
    statement = _SQL.change_role if exists else _SQL.create_role
    await connection.execute(await connection.fetchval(statement, role, scram.verifier(password.reveal())))


async def _gets_in(owner_dsn: str, role: str, password: Secret) -> bool:
    try:
        async with _connected(with_login(owner_dsn, role, password.reveal()), raised=_REFUSALS):
            return True
    # Only a refusal means that the login was changed; an outage must not reset passwords.
    except _REFUSALS:
        return False


async def forget_fences(owner_dsn: str) -> int:
    """Delete all fences; returns how many there were."""
    async with _connected(owner_dsn) as connection:
        try:
            return int(await connection.fetchval(_RESTORED_SQL.forget_fences))
        except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
            raise Conflict("NotRestored", "this is no data database: it has no fences") from None
