"""Transactions of the state database: one per step, run again when Postgres asks for it; outbox entries; the clock.

Every transaction that routes or claims begins by sharing the deploy lock, in the same round trip as ``BEGIN``; a
deploy takes it exclusively. Locks inside a transaction are taken in one order everywhere: tasks, then jobs, then
dataset versions, each by id. A deadlock is therefore a bug, but not an outage: the whole transaction is rolled back
and run again.

Outbox entries commit with their cause and are delivered afterwards: ``on_commit`` listeners receive them once the
commit is certain. ``database_now`` is the one clock: lease and retry times are compared with no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum
from typing import Any, Protocol, TypeVar
from uuid import UUID

import asyncpg
import msgspec

from tracelake.domain.errors import Unavailable
from tracelake.postgres.sessions import KEEPALIVES, end_transactions_after

T = TypeVar("T")
Row = asyncpg.Record
_MAX_TRIES = 8
_CONNECT_SECONDS = 10.0
# Beyond the server's own limit, so that it is reached only when the server or the network is gone.
_COMMAND_SECONDS = 16.0
_ROLLBACK_SECONDS = 2.0
# Several statements at their limit; a session that holds locks for longer has lost its Dispatcher.
_TRANSACTION_SECONDS = 40


class LockMissing(Exception):
    """A step found, under its locks, that it has to change more than it has locked: it is run again from the start,
    and then finds before the locks what it found now."""


_RETRY = (
    LockMissing,
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
    # asyncpg raises it for a session that the server ended while it was idle.
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
# Planning a claim anew costs more than running it, so hot steps plan a statement once per connection. Such a
# plan must not depend on how full the tables were then: no scan of a whole table where an index serves.
_PLAN_ONCE = "SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off"


log = logging.getLogger(__name__)


class DeployLock(Enum):
    """A transaction's lock against deploys; the values open the transaction. It is a lock on a table, which guest
    roles of the database can't take, while any role may take an advisory lock."""

    NONE = "BEGIN"
    SHARED = "BEGIN; LOCK TABLE deploy_lock IN ROW SHARE MODE"
    EXCLUSIVE = "BEGIN; LOCK TABLE deploy_lock IN EXCLUSIVE MODE"


class Connection(Protocol):
    """The part of a database connection that transactions use; a simulation replaces it."""

    async def fetch(self, query: str, *args: Any) -> list[Row]: ...

    async def execute(self, query: str, *args: Any) -> str: ...

    def is_closed(self) -> bool: ...

    def terminate(self) -> None: ...


class Connections(Protocol):
    def acquire(self) -> AbstractAsyncContextManager[Connection]: ...


class Transaction:
    """One open transaction, and the outbox entries that it has written so far."""

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
    """Runs transactions. ``on_commit`` listeners receive outbox entries after their commit."""

    def __init__(
        self,
        connections: Connections,
        *,
        on_silence: Callable[[], Awaitable[None]] | None = None,
        rollback_seconds: float | None = _ROLLBACK_SECONDS,
    ) -> None:
        """``on_silence`` is called when a connection has stopped answering: the others of the pool may be dead
        too."""
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
            # A transaction whose COMMIT got no answer is not run again here: it may
            # have committed. Callers repeat whole calls, whose answers are the same.
            except _LOST as error:
                # Only silence says something about other connections; an error is this one's own.
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
            # One round trip, and the deploy lock comes before any
            # row's, so that a step and a deploy can't deadlock.
            await connection.execute("; ".join(opening))
            tx = Transaction(connection)
            try:
                yield tx
                await connection.execute("COMMIT")
            # Also for a cancelled request: the pool resets no session,
            # and its next user would get the open transaction.
            except BaseException as error:
                await _abandon(connection, error, self._rollback_seconds)
                raise
        # Outside of the try: an error of a listener must not look like a failed commit.
        if tx.outbox:
            for listener in self._listeners:
                listener(tx.outbox)


async def _abandon(connection: Connection, error: BaseException, seconds: float | None) -> None:
    """Roll back, or drop the connection when even that fails (the server then rolls back)."""
    if connection.is_closed():
        return
    # A server that didn't answer a statement won't answer ROLLBACK either.
    if isinstance(error, TimeoutError):
        connection.terminate()
        return
    try:
        async with asyncio.timeout(seconds):
            await connection.execute("ROLLBACK")
    # The timeout above ends in a TimeoutError, which is an OSError.
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        with contextlib.suppress(Exception):
            connection.terminate()
    # A task that is cancelled while it rolls back after another error must still end.
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            connection.terminate()
        raise


async def open_pool(
    dsn: str, *, min_size: int = 2, max_size: int = 12, application: str = "tracelake"
) -> asyncpg.Pool:
    """A pool whose connections decode JSON and have limits on every wait."""
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
            # Statements here take milliseconds, less than it would take to compile them.
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
        # Postgres sends jsonb in binary as a version number, always 1, followed by the text.
        encoder=lambda value: b"\x01" + msgspec.json.encode(value),
        decoder=lambda raw: msgspec.json.decode(raw[1:]),
        schema="pg_catalog",
        format="binary",
    )


async def _keep_session(connection: asyncpg.Connection) -> None:
    """Transactions leave no state in the session, so the usual reset would only cost a round trip."""


class OutboxKind(StrEnum):
    """``wake`` wakes a runtime for a task; ``buffer`` carries a message to a buffered dataset's queue."""

    WAKE = "wake"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """An ``available_at`` in the future is that of a retry's wake-up. ``runtime`` is the destination; for a
    ``buffer`` entry it is the queue itself. A bulk task has been ready for ``waited`` seconds."""

    outbox_id: int
    kind: OutboxKind
    runtime: str
    task_id: UUID | None
    payload: dict[str, Any]
    available_at: datetime
    due: bool
    waited: float = 0.0

    def behind(self, max_bulk_wait: float) -> float:
        """A bulk task waits behind normal ones that come up to this many seconds later. What it has waited since it
        became ready counts, so that it doesn't begin anew with every wake-up."""
        if not self.payload.get("bulk"):
            return 0.0
        return max(0.0, max_bulk_wait - max(0.0, self.waited))


async def database_now(tx: Transaction) -> datetime:
    row = await tx.fetchrow("SELECT tl_now() AS now")
    assert row is not None
    moment: datetime = row["now"]
    return moment
