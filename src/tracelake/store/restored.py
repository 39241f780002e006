"""What the state database needs after it was restored from a backup, before a Dispatcher uses it.

Epochs fence writes to the data database, so none may be drawn twice. The restored sequence stands where it stood at
the backup; how many were drawn since nobody knows any more, so it is advanced by more than there can have been.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from tracelake import sqlfiles
from tracelake.domain.errors import Conflict, Unavailable

LEAP = 1_000_000_000
"""Of what a bigint holds, there are nine thousand million."""

_SQL = sqlfiles.load("tracelake.store", "sql/restored.sql")


async def advance_epochs(dsn: str) -> int:
    """Where the sequence stands from now on."""
    try:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(dsn, timeout=10)
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise Unavailable("StateUnavailable", f"can't connect to the state database: {error}") from None
    try:
        return int(await connection.fetchval(_SQL.advance_epochs, LEAP))
    except asyncpg.UndefinedTableError:
        raise Conflict("NotRestored", "this is no state database: it has no epochs") from None
    finally:
        await connection.close()
