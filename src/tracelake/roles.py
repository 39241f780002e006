"""Changes to roles, which all databases of a Postgres cluster share.

No lock of one database keeps another one's session away from a role, and Postgres doesn't wait where two
of them change it: the later one fails. So a change of roles is one transaction that is made again when
somebody else's came between, until it gets through.

Where the other one is still open, Postgres does wait, and every role can change its own password and revoke its own
rights: a guest that leaves such a transaction open would keep its owner waiting for ever. So whoever waits for a
guest's transaction ends the guest's session.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import asyncpg

from tracelake import sqlfiles
from tracelake.domain.errors import Conflict, Unavailable
from tracelake.postgres_sessions import while_waiting

_SQL = sqlfiles.load("tracelake", "roles.sql")
_TRIES = 50
_PAUSE_SECONDS = 0.05
_PATIENCE_SECONDS = 0.2
_CONNECT_SECONDS = 10.0

log = logging.getLogger(__name__)


async def change_roles(
    connection: asyncpg.Connection[Any],
    change: Callable[[], Awaitable[None]],
    *,
    dsn: str,
    guests: Sequence[str],
) -> None:
    """Run ``change`` in a transaction of its own; it must give the same result when it is run again. ``dsn`` is
    the connection's own; sessions of ``guests``, and of attempts, don't hold it up. ``Unavailable`` when
    somebody else does."""
    for left in reversed(range(_TRIES)):
        try:
            await while_waiting(
                _changed(connection, change), _Unblocker(connection, dsn, guests).unblock, _PATIENCE_SECONDS
            )
            return
        except asyncpg.LockNotAvailableError:
            raise Unavailable(
                "RolesHeld",
                f"a transaction that somebody has left open holds the roles {', '.join(guests)}, and its session "
                "can't be ended from here: look for it in pg_stat_activity, end it, and try again",
            ) from None
        except (
            asyncpg.InternalServerError,
            asyncpg.UniqueViolationError,
            asyncpg.DuplicateObjectError,
        ) as error:
            if not left or not _is_lost_race(error):
                raise
        await asyncio.sleep(_PAUSE_SECONDS * random.uniform(0.5, 1.5))


async def _changed(connection: asyncpg.Connection[Any], change: Callable[[], Awaitable[None]]) -> None:
    async with connection.transaction():
        await connection.execute(_SQL.wait_at_most)
        await change()


class _Unblocker:
    """The session that waits can't ask whom it waits for: another one does."""

    def __init__(self, waiting: asyncpg.Connection[Any], dsn: str, guests: Sequence[str]) -> None:
        self._waiting = waiting
        self._dsn = dsn
        self._guests = list(guests)

    async def unblock(self) -> None:
        try:
            asking: asyncpg.Connection[Any] = await asyncpg.connect(self._dsn, timeout=_CONNECT_SECONDS)
        except (OSError, TimeoutError, asyncpg.PostgresError) as error:
            log.warning("can't look who holds the roles: %s", error)
            return
        try:
            ended = await asking.fetch(_SQL.end_blockers, self._waiting.get_server_pid(), self._guests)
        except asyncpg.InsufficientPrivilegeError as error:
            log.warning("can't end the session that holds the roles: %s", error)
            return
        finally:
            await asking.close()
        for row in ended:
            log.warning("a session of %s that held up its owner was ended", row["usename"])


async def put_bare_role(
    connection: asyncpg.Connection[Any], role: str, verifier: str, *, needed_by: str, connections: int
) -> None:
    """A role that can log in, so many times at once, and nothing else; its password is the one given last. One that
    can or owns anything already is somebody's: it is left alone and the install refused."""
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
    await connection.execute(await connection.fetchval(statement, role, verifier, connections))
    await act_as(connection, role)


async def act_as(connection: asyncpg.Connection[Any], role: str) -> None:
    """So that the role's sessions can be ended, and what it makes given to others."""
    await connection.execute(await connection.fetchval(_SQL.act_as, role))


async def strip_public(connection: asyncpg.Connection[Any]) -> tuple[str, ...]:
    """Take from everybody, in this database, what Postgres lets everybody do in every one. Answers what is left
    of it: an owner that is no superuser can't take it."""
    if await connection.fetchval(_SQL.is_superuser):
        await connection.execute(_SQL.strip_public)
    return tuple(row["what"] for row in await connection.fetch(_SQL.left_to_public))


async def strip_public_or_say(connection: asyncpg.Connection[Any]) -> None:
    """The same, and what is left is said in the log."""
    if left := await strip_public(connection):
        log.warning(
            "whoever can log in to the database %s can use %s: only a superuser can take that back",
            await connection.fetchval(_SQL.database),
            ", ".join(left),
        )


def _is_lost_race(error: asyncpg.PostgresError) -> bool:
    """Postgres has no code of its own for a catalogue row that changed under a statement."""
    return not isinstance(error, asyncpg.InternalServerError) or "concurrently" in str(error)
