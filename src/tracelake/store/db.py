"""The state database as steps see it: one transaction per step, retried when Postgres says so.

Every transaction that routes or claims begins by sharing the deploy lock, in the same round trip as
``BEGIN``; a deploy takes it alone. Locks inside a transaction are taken in one order everywhere:
tasks, then jobs, then dataset versions, each by id. A deadlock is therefore a bug, but not an outage:
the transaction is rolled back whole and run again.

What a transaction wrote to the outbox is handed to ``on_commit`` listeners once the commit is certain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import Enum
from typing import Any, Protocol, TypeVar

import asyncpg
import msgspec

from tracelake.domain.errors import Unavailable
from tracelake.postgres_sessions import KEEPALIVES, end_transactions_after
from tracelake.store.outbox_entry import OutboxEntry

T = TypeVar("T")
Row = asyncpg.Record

log = logging.getLogger(__name__)

_MAX_TRIES = 8
_CONNECT_SECONDS = 10.0
# Beyond the server's own limit, so that it is reached only when the server, or the way to it, is gone.
_COMMAND_SECONDS = 16.0
_ROLLBACK_SECONDS = 2.0
# Several statements at their limit; whoever holds locks for longer has lost its Dispatcher.
_TRANSACTION_SECONDS = 40
CLOSE_SECONDS = 1.0
_RETRY = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    # Two transactions made the same row at once: the second one decides again, seeing the first.
    asyncpg.UniqueViolationError,
    asyncpg.ExclusionViolationError,
)
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InterfaceError,
    # What asyncpg says of a session that the server ended while it was idle.
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)


class DeployLock(Enum):
    """How a transaction stands to deploys. The values open the transaction. A table is locked, since guests of the
    database can't lock that, while everybody may take an advisory lock."""

    NONE = "BEGIN"
    SHARED = "BEGIN; LOCK TABLE deploy_lock IN ROW SHARE MODE"
    EXCLUSIVE = "BEGIN; LOCK TABLE deploy_lock IN EXCLUSIVE MODE"


# Planning a claim anew costs more than running it, so hot steps plan a statement once per connection. Such a
# plan must not depend on how full the tables were then: no scan of a whole table where an index serves.
_PLAN_ONCE = "SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off"


class Connection(Protocol):
    """What is used of a database connection; a simulation stands in for it here."""

    async def fetch(self, query: str, *args: Any) -> list[Row]: ...

    async def execute(self, query: str, *args: Any) -> str: ...

    def is_closed(self) -> bool: ...

    def terminate(self) -> None: ...


class Connections(Protocol):
    def acquire(self) -> AbstractAsyncContextManager[Connection]: ...


class Transaction:
    """One open transaction, and what it has put in the outbox so far."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.outbox: list[OutboxEntry] = []

    async def fetch(self, query: str, *args: Any) -> list[Row]:
        return await self._connection.fetch(query, *args)

    async def fetchrow(self, query: str, *args: Any) -> Row | None:
        rows = await self._connection.fetch(query, *args)
        return rows[0] if rows else None

    async def execute(self, query: str, *args: Any) -> None:
        await self._connection.execute(query, *args)


class Database:
    """Runs transactions. ``on_commit`` listeners hear of outbox entries after their commit."""

    def __init__(
        self,
        connections: Connections,
        *,
        on_silence: Callable[[], Awaitable[None]] | None = None,
        rollback_seconds: float | None = _ROLLBACK_SECONDS,
    ) -> None:
        """``on_silence`` is called when a connection has stopped answering: its neighbours are suspect too."""
        self._rollback_seconds = rollback_seconds
        self._connections = connections
        self._on_silence = on_silence
        self._listeners: list[Callable[[Sequence[OutboxEntry]], None]] = []

    def on_commit(self, listener: Callable[[Sequence[OutboxEntry]], None]) -> None:
        self._listeners.append(listener)

    async def run(
        self,
        work: Callable[[Transaction], Awaitable[T]],
        *,
        lock: DeployLock = DeployLock.SHARED,
        durable: bool = True,
        hot: bool = False,
    ) -> T:
        """Run ``work`` in one transaction; again, from the start, when Postgres asks for that.

        ``hot`` is for steps whose statements find everything by key: they are planned once.
        """
        for again in range(_MAX_TRIES):
            try:
                async with self.transaction(lock=lock, durable=durable, hot=hot) as tx:
                    return await work(tx)
            except _RETRY as error:
                log.warning("transaction rolled back, running it again", extra={"cause": str(error)})
                if again == _MAX_TRIES - 1:
                    raise Unavailable("Contention", "the state database is too contended") from error
            except _LOST as error:
                if isinstance(error, TimeoutError) and self._on_silence is not None:
                    await self._on_silence()
                raise Unavailable(
                    "StateUnavailable", f"the state database is unavailable: {error}"
                ) from error
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def transaction(
        self, *, lock: DeployLock = DeployLock.SHARED, durable: bool = True, hot: bool = False
    ) -> AsyncIterator[Transaction]:
        opening = [lock.value]
        if not durable:
            opening.append("SET LOCAL synchronous_commit = off")
        if hot:
            opening.append(_PLAN_ONCE)
        async with self._connections.acquire() as connection:
            await connection.execute("; ".join(opening))
            tx = Transaction(connection)
            try:
                yield tx
                await connection.execute("COMMIT")
            except BaseException as error:
                await _abandon(connection, error, self._rollback_seconds)
                raise
        if tx.outbox:
            for listener in self._listeners:
                listener(tx.outbox)


async def _abandon(connection: Connection, error: BaseException, seconds: float | None) -> None:
    """Roll back, or drop the connection when even that can't be said (the server then rolls back)."""
    if connection.is_closed():
        return
    if isinstance(error, TimeoutError):
        connection.terminate()
        return
    try:
        async with asyncio.timeout(seconds):
            await connection.execute("ROLLBACK")
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, asyncio.CancelledError):
        with contextlib.suppress(Exception):
            connection.terminate()


async def open_pool(
    dsn: str, *, min_size: int = 2, max_size: int = 12, application: str = "tracelake"
) -> asyncpg.Pool:
    """A pool whose connections speak JSON and never wait for ever."""
    return await asyncpg.create_pool(
        dsn,
        min_size=min_size,
        max_size=max_size,
        init=_open_session,
        reset=_keep_session,
        timeout=_CONNECT_SECONDS,
        command_timeout=_COMMAND_SECONDS,
        server_settings={
            **KEEPALIVES,
            "application_name": application,
            "statement_timeout": "15s",
            "lock_timeout": "10s",
            "idle_in_transaction_session_timeout": "10s",
            "timezone": "UTC",
            "jit": "off",
        },
    )


_limit_transactions = end_transactions_after(_TRANSACTION_SECONDS)


async def _open_session(connection: asyncpg.Connection) -> None:
    await prepare_connection(connection)
    await _limit_transactions(connection)


async def prepare_connection(connection: asyncpg.Connection) -> None:
    await connection.set_type_codec(
        "jsonb",
        encoder=lambda value: b"\x01" + msgspec.json.encode(value),
        decoder=lambda raw: msgspec.json.decode(raw[1:]),
        schema="pg_catalog",
        format="binary",
    )


async def _keep_session(connection: asyncpg.Connection) -> None:
    """Transactions leave nothing behind in the session, so the usual reset would only cost a round trip."""
