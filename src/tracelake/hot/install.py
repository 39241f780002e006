"""Sets up the data database and its roles: one that owns staging tables, one that commits them, one that reads.

Nobody logs in by the first one; the other two are for processes that are trusted. Operators get neither: each
attempt has a login of its own, which the writer asks functions of this database for (``tracelake.open_ticket``).
These make roles as whoever has installed them, who must therefore be allowed to.

Passwords of the two logins belong to the database (schema ``installation``): the first install puts them there,
later ones take what they find, from whichever home they are run. Installing again is safe: it migrates, and renews
grants and passwords.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from tracelake import scram, sqlfiles
from tracelake.domain.errors import Conflict, Unavailable
from tracelake.migrations import Schema
from tracelake.roles import act_as, change_roles, strip_public
from tracelake.secret import Secret

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
"""What the grants set for the roles in this database; they have no settings elsewhere."""

_SQL = sqlfiles.load("tracelake.hot", "sql/install.sql")
_DATA = Schema("data", "tracelake.hot.migrations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """``applied`` are the names of the migrations that were missing; the passwords are those that hold now.
    ``left_to_everybody`` is what Postgres lets everybody do and the installer couldn't take back."""

    applied: list[str]
    writer_password: Secret
    reader_password: Secret
    left_to_everybody: tuple[str, ...] = ()


async def install(
    admin_dsn: str, *, writer_password: Secret, reader_password: Secret, replace: bool = False
) -> Installed:
    """Prepare the database of ``admin_dsn``. The passwords given are for a database that has none yet, unless they
    are to ``replace`` those that it has."""
    async with _connected(admin_dsn) as connection:
        is_superuser = await _check_installer(connection)
        applied = await _DATA.migrate(connection)
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
            await connection.execute(await connection.fetchval(_SQL.close_database))
            left_to_everybody = await strip_public(connection)
            if is_superuser:
                await connection.execute(await connection.fetchval(_SQL.reserve, WRITER_ROLE))
            await connection.execute(await connection.fetchval(_SQL.grants, STAGING_ROLE, WRITER_ROLE))
            await connection.execute(await connection.fetchval(_SQL.open_staging, STAGING_ROLE))
            await connection.execute(await connection.fetchval(_SQL.grant_reading, READER_ROLE, WRITER_ROLE))
            await connection.execute(_SQL.revoke_functions)
            await connection.execute(await connection.fetchval(_SQL.grant_functions, WRITER_ROLE))

        # Every attempt waits for the lock of the grants; roles, which their own sessions may hold, come before it.
        await change_roles(connection, put_roles, dsn=admin_dsn, guests=_ROLES)
        await change_roles(connection, put_grants, dsn=admin_dsn, guests=_ROLES)
        await connection.execute(_SQL.end_sessions, STAGING_ROLE)
        return Installed(
            applied=applied,
            writer_password=writer_password,
            reader_password=reader_password,
            left_to_everybody=left_to_everybody,
        )


async def open_databases(admin_dsn: str) -> list[str]:
    """The other databases of the server that an attempt's login could enter: every one is open to everybody until
    somebody closes it. They aren't this module's to close unasked."""
    async with _connected(admin_dsn) as connection:
        return [row["datname"] for row in await connection.fetch(_SQL.open_databases)]


async def restore_roles(admin_dsn: str, *, writer_password: Secret, reader_password: Secret) -> list[str]:
    """Give those roles their passwords, settings and rights again that have other ones now, and return which they
    were: a role can't be kept from changing its own. Costs three logins when all is well."""
    passwords = {WRITER_ROLE: writer_password, READER_ROLE: reader_password}
    async with _connected(admin_dsn) as connection:
        changed = [
            role
            for role, password in passwords.items()
            if set(await connection.fetchval(_SQL.settings, role)) != _SETTINGS[role]
            or await _lacks_rights(connection, role)
            or not await _gets_in(admin_dsn, role, password)
        ]

        async def put_roles() -> None:
            for role in changed:
                await _put_role(connection, role, passwords[role])
                await connection.execute(await connection.fetchval(_SQL.reset_settings, role))
            await connection.execute(await connection.fetchval(_SQL.grants, STAGING_ROLE, WRITER_ROLE))
            await connection.execute(await connection.fetchval(_SQL.grant_reading, READER_ROLE, WRITER_ROLE))

        if changed:
            await change_roles(connection, put_roles, dsn=admin_dsn, guests=_ROLES)
        return changed


async def _lacks_rights(connection: asyncpg.Connection[Any], role: str) -> bool:
    if role == WRITER_ROLE:
        return bool(await connection.fetchval(_SQL.lacks_writing, STAGING_ROLE, WRITER_ROLE))
    return bool(await connection.fetchval(_SQL.lacks_reading, READER_ROLE, WRITER_ROLE))


@asynccontextmanager
async def _connected(admin_dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    try:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(admin_dsn, timeout=10)
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise Unavailable("DataUnavailable", f"can't connect to the data database: {error}") from None
    try:
        yield connection
    finally:
        await connection.close()


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


async def _gets_in(dsn: str, role: str, password: Secret) -> bool:
    try:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(
            dsn, user=role, password=password.reveal(), timeout=10
        )
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InsufficientPrivilegeError):
        return False
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise Unavailable("DataUnavailable", f"can't connect to the data database: {error}") from None
    await connection.close()
    return True
