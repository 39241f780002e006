"""Sessions of Postgres, and the limits that end a session whose client has vanished, with the locks it holds.

``idle_in_transaction_session_timeout`` ends a session that waits for the next statement, ``statement_timeout``
cancels one that runs. Neither ends a session whose client vanished between the messages of one statement, after
the statement was parsed and before it was executed: the server counts it as running, and ignores a cancel while
it reads from the client. ``transaction_timeout`` does, from Postgres 17 on; older servers notice by TCP keepalives
that the client's machine is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg

from tracelake.domain.errors import Unavailable
from tracelake.postgres import sqlfiles
from tracelake.settings import Secret

T = TypeVar("T")
KEEPALIVES = {
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
"""Server settings of every connection: the server notices within 40 seconds that a client's machine is gone."""
DATABASE_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)
"""The errors of a database that is down, overloaded or replaced, and of a statement that it refuses."""
_SQL = sqlfiles.load("tracelake.postgres", "sessions.sql")
_CONNECT_SECONDS = 5.0
_OWNER_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 10.0
_KEPT_COMMAND_SECONDS = 16.0
_TRANSACTION_SECONDS = 40
_CLOSE_SECONDS = 1.0


@asynccontextmanager
async def connected(
    dsn: str, *, unavailable: str, database: str, raised: tuple[type[Exception], ...] = ()
) -> AsyncIterator[asyncpg.Connection[Any]]:
    """One session without a pool, for an installation or a repair: a migration may take longer than a pool lets a
    statement run. ``unavailable`` is the reason of the error when ``database`` can't be connected to, ``raised``
    are errors of the connection that the caller handles itself."""
    try:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(
            dsn, timeout=_OWNER_CONNECT_SECONDS, server_settings={"application_name": "tracelake-install"}
        )
    except raised:
        raise
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise Unavailable(unavailable, f"can't connect to {database}: {error}") from None
    try:
        yield connection
    finally:
        await connection.close()


class KeptSessions:
    """One session per DSN, kept from one use to the next, for a loop that looks every few seconds."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._sessions: dict[str, asyncpg.Connection[Any]] = {}

    async def to(self, dsn: str) -> asyncpg.Connection[Any]:
        session = self._sessions.get(dsn)
        if session is None or session.is_closed():
            session = await asyncpg.connect(
                dsn,
                timeout=_OWNER_CONNECT_SECONDS,
                command_timeout=_KEPT_COMMAND_SECONDS,
                server_settings={**KEEPALIVES, "application_name": self._application},
            )
            self._sessions[dsn] = session
        return session

    def close(self) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            # A graceful close waits for a server that may no longer answer.
            session.terminate()


def end_transactions_after(seconds: int) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """An ``init`` function for a pool: a transaction that is open for longer ends, together with its session."""

    async def limit(connection: Any) -> None:
        await connection.fetch(_SQL.end_transactions_after, f"{seconds}s")

    return limit


async def while_waiting(
    work: Coroutine[Any, Any, T], look: Callable[[], Awaitable[object]], patience: float
) -> T:
    """The result of ``work``. ``look`` is called after every ``patience`` seconds that it takes: it may find a
    session in the way and end it."""
    # A task of its own, since a look must run while the work waits.
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=patience))[0]:
            await look()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            # The connection is the caller's: it must not get it while a statement still runs on it.
            await asyncio.wait({task})


async def open_statement_pool(dsn: Secret, connections: int, application: str) -> asyncpg.Pool[Any]:
    """A pool for single short statements. It doesn't wait for the database, and keeps no connection open for
    longer than it is used now and then."""
    return await asyncpg.create_pool(
        dsn.reveal(),
        min_size=0,
        max_size=connections,
        init=end_transactions_after(_TRANSACTION_SECONDS),
        reset=_keep_session,
        timeout=_CONNECT_SECONDS,
        command_timeout=_COMMAND_SECONDS,
        server_settings={
            **KEEPALIVES,
            "application_name": application,
            "timezone": "UTC",
            "jit": "off",
            "plan_cache_mode": "force_generic_plan",
        },
    )


async def close_pool(pool: asyncpg.Pool[Any], seconds: float = _CLOSE_SECONDS) -> None:
    """In order if that can be done in time; calls that are still running are cut off (the server rolls back)."""
    try:
        async with asyncio.timeout(seconds):
            await pool.close()
    except TimeoutError:
        # pool.close waits for every connection in use, however long that takes.
        pool.terminate()


async def _keep_session(_connection: object) -> None:
    """Single statements leave nothing behind in the session, so the usual reset would only cost a round trip."""
