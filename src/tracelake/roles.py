"""Changes to roles, which all databases of a Postgres cluster share.

No lock of one database keeps another one's session away from a role, and Postgres doesn't wait where two
of them change it: the later one fails. So a change of roles is one transaction that is made again when
somebody else's came between, until it gets through.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg

from tracelake import sqlfiles
from tracelake.domain.errors import Conflict

_SQL = sqlfiles.load("tracelake", "roles.sql")
_TRIES = 50
_PAUSE_SECONDS = 0.05


async def change_roles(connection: asyncpg.Connection[Any], change: Callable[[], Awaitable[None]]) -> None:
    """Run ``change`` in a transaction of its own; it must give the same result when it is run again."""
    for left in reversed(range(_TRIES)):
        try:
            async with connection.transaction():
                await change()
            return
        except (
            asyncpg.InternalServerError,
            asyncpg.UniqueViolationError,
            asyncpg.DuplicateObjectError,
        ) as error:
            if not left or not _is_lost_race(error):
                raise
        await asyncio.sleep(_PAUSE_SECONDS * random.uniform(0.5, 1.5))


async def put_bare_role(
    connection: asyncpg.Connection[Any], role: str, verifier: str, *, needed_by: str
) -> None:
    """A role that can log in and nothing else; its password is the one given last. One that can or owns anything
    already is somebody's: it is left alone and the install refused."""
    existing = await connection.fetchrow(_SQL.role, role)
    if existing is None:
        statement = _SQL.create_role
    elif existing["privileged"] or existing["member"] or existing["owner"]:
        raise Conflict(
            "RoleInUse",
            f"the role {role!r} has rights, memberships or property already: {needed_by} needs one without",
        )
    else:
        statement = _SQL.change_role
    await connection.execute(await connection.fetchval(statement, role, verifier))


def _is_lost_race(error: asyncpg.PostgresError) -> bool:
    """Postgres has no code of its own for a catalogue row that changed under a statement."""
    return not isinstance(error, asyncpg.InternalServerError) or "concurrently" in str(error)
