"""Sets up the data database and its roles: one that stages rows, one that commits them, one that reads them.

Installing again is safe: it migrates, renews the grants and sets the passwords given.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from tracelake import scram, sqlfiles
from tracelake.domain.errors import Unavailable
from tracelake.migrations import Schema
from tracelake.roles import change_roles
from tracelake.secret import Secret

STAGING_ROLE = "tracelake_staging"
WRITER_ROLE = "tracelake_writer"
READER_ROLE = "tracelake_reader"

_SQL = sqlfiles.load("tracelake.hot", "sql/install.sql")
_DATA = Schema("data", "tracelake.hot.migrations", lock=8_600_002)


async def install(
    admin_dsn: str, *, staging_password: Secret, writer_password: Secret, reader_password: Secret
) -> list[str]:
    """Prepare the database of ``admin_dsn``; returns the names of the migrations that were applied."""
    try:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(admin_dsn, timeout=10)
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise Unavailable("DataUnavailable", f"can't connect to the data database: {error}") from None
    try:
        applied = await _DATA.migrate(connection)

        async def put_roles() -> None:
            await _put_role(connection, STAGING_ROLE, staging_password)
            await _put_role(connection, WRITER_ROLE, writer_password)
            await _put_role(connection, READER_ROLE, reader_password)
            await connection.execute(await connection.fetchval(_SQL.close_database))
            await connection.execute(await connection.fetchval(_SQL.grants, STAGING_ROLE, WRITER_ROLE))
            await connection.execute(await connection.fetchval(_SQL.act_as, WRITER_ROLE))
            await connection.execute(await connection.fetchval(_SQL.grant_reading, READER_ROLE, WRITER_ROLE))
            await connection.execute(_SQL.revoke_functions)
            await connection.execute(await connection.fetchval(_SQL.grant_functions, WRITER_ROLE))

        await change_roles(connection, put_roles)
        return applied
    finally:
        await connection.close()


async def _put_role(connection: asyncpg.Connection[Any], role: str, password: Secret) -> None:
    exists = await connection.fetchval(_SQL.role_exists, role)
    statement = _SQL.change_role if exists else _SQL.create_role
    await connection.execute(await connection.fetchval(statement, role, scram.verifier(password.reveal())))
