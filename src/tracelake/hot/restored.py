"""What the data database needs after a restore of either database, before a worker uses it.

Fences name epochs and revisions of inputs that the restored state may never have heard of; one that is ahead of it
would keep every attempt away from its blocks. Without fences whoever ran before commits nothing, and whoever begins
writes a new one.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from tracelake import sqlfiles
from tracelake.domain.errors import Conflict, Unavailable

_SQL = sqlfiles.load("tracelake.hot", "sql/restored.sql")


async def forget_fences(dsn: str) -> int:
    """How many there were."""
    try:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(dsn, timeout=10)
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise Unavailable("DataUnavailable", f"can't connect to the data database: {error}") from None
    try:
        return int(await connection.fetchval(_SQL.forget_fences))
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        raise Conflict("NotRestored", "this is no data database: it has no fences") from None
    finally:
        await connection.close()
