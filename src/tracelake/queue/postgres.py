"""The ``pg`` driver: queues as rows of one table, in a database of their own.

Each call is one statement and one round trip. Receivers take rows by SKIP LOCKED through an index whose visible
end holds only due messages, wait without a connection, and are woken by ``wakeups``. Sessions commit
asynchronously; a call with ``durable=True`` raises that for its own transaction, and makes all earlier commits
durable as well, since the log is written in order. Receipts are random, not counted: a crash may undo a delivery
that was committed asynchronously, and the next delivery must not get the same receipt.

``Floors`` keeps receives fast between two vacuums, while the front of the index is full of entries of deleted
messages that every receive would walk over. A receiver that just took a full batch knows that nothing older was
left, so its next look starts there. That is a hint and may be wrong: a message whose transaction was still open
at the last look can turn up below the floor. So the floor stays a little behind the clock (see the query), is
dropped as soon as a look finds less than it asked for, and expires after a second without a look from the very
front. So what is published with a head start may be seen a second late behind a backlog without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import orjson

from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.postgres import sqlfiles
from tracelake.postgres.sessions import KEEPALIVES, close_pool, end_transactions_after
from tracelake.queue.base import (
    MAX_HEAD_START,
    Body,
    DeadLetter,
    Message,
    Queue,
    QueueDepth,
    check_queue_name,
    check_receive,
    check_seconds,
    encode_body,
)
from tracelake.queue.postgres_install import SCHEMA
from tracelake.queue.wakeups import QueueConnection, Wakeups

_SQL = sqlfiles.load("tracelake.queue", "sql/messages.sql")
# The plan must not depend on when the table was last analyzed: a queue is empty one moment and full the next.
SESSION = {
    **KEEPALIVES,
    "application_name": "tracelake-queue",
    # A wake-up that a crash loses is sent again, and most calls needn't wait for the disk.
    "synchronous_commit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
}
_COMMAND_TIMEOUT = 30.0
_TRANSACTION_SECONDS = 60
_CONNECT_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 2.0
_SHORTEST_WAIT = 0.001
_OUTAGE_BACKOFF = Backoff(first=0.05, longest=1.0)
_OUTAGE = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InterfaceError,
    # asyncpg's error for a session that the server ended while it was idle, until it sees the socket close.
    asyncpg.InternalClientError,
)
_REFUSALS = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)
FRONT = datetime(2000, 1, 1, tzinfo=UTC)
"""A floor below every message."""
_FLOOR_SECONDS = 1.0


class PostgresQueue(Queue):
    """See ``tracelake.queue.base`` for what it promises; made by ``open``."""

    def __init__(
        self, pool: asyncpg.Pool[Any], wakeups: Wakeups, *, max_receives: int, fallback_poll_seconds: float
    ) -> None:
        self._pool = pool
        self._wakeups = wakeups
        self._max_receives = max_receives
        self._fallback_poll_seconds = fallback_poll_seconds
        self._closed = False
        self._floors = Floors(asyncio.get_running_loop().time)

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        max_receives: int = 10,
        pool_size: int = 4,
        fallback_poll_seconds: float = 1.0,
        coalesce_seconds: float = 0.003,
    ) -> PostgresQueue:
        """Connect, check the schema's version, start listening. ``Unavailable`` if there is no server."""

        async def connect() -> QueueConnection:
            return await asyncpg.connect(
                dsn, server_settings=SESSION, timeout=_CONNECT_TIMEOUT, command_timeout=_COMMAND_TIMEOUT
            )

        pool: asyncpg.Pool[Any] = asyncpg.create_pool(
            dsn,
            min_size=1,
            max_size=pool_size,
            # asyncpg replaces a connection after 50,000 queries
            # by default, which would only cost a reconnect.
            max_queries=2**31,
            server_settings=SESSION,
            timeout=_CONNECT_TIMEOUT,
            command_timeout=_COMMAND_TIMEOUT,
            init=end_transactions_after(_TRANSACTION_SECONDS),
            reset=_nothing_to_reset,
        )
        async with _outage_as_unavailable():
            try:
                await pool
            # A wrong password doesn't pass by itself, unlike an outage, and must not be retried.
            except _REFUSALS as error:
                raise Invalid("QueueRefused", f"the queue's database refuses the login: {error}") from None
            try:
                await SCHEMA.check(pool)
            except BaseException:
                pool.terminate()
                raise
        wakeups = Wakeups(connect, coalesce_seconds)
        wakeups.start()
        return cls(pool, wakeups, max_receives=max_receives, fallback_poll_seconds=fallback_poll_seconds)

    async def close(self) -> None:
        self._closed = True
        await self._wakeups.close()
        await close_pool(self._pool, _CLOSE_TIMEOUT)

    async def listening(self) -> None:
        """Returns once publishes of other processes wake receivers here at once."""
        await self._wakeups.listening()

    async def publish(
        self,
        queue: str,
        bodies: Sequence[Body],
        *,
        delay: float = 0.0,
        durable: bool = False,
        head_start: float = 0.0,
    ) -> list[str]:
        check_queue_name(queue)
        check_seconds("delay", delay)
        texts = [encode_body(body) for body in bodies]
        if not texts:
            return []
        # Only what is visible at once can have one; it must not make a delayed message visible early.
        start = min(head_start, MAX_HEAD_START) if delay == 0 else 0.0
        rows = await self._fetch(_SQL.publish, queue, texts, delay - start, _commit(durable))
        # After the commit: a receiver that is woken earlier would find nothing and sleep again.
        self._wakeups.announce(queue)
        return [str(row["id"]) for row in rows]

    async def receive(
        self,
        queue: str,
        *,
        max_messages: int = 10,
        wait_seconds: float = 0.0,
        visibility_seconds: float = 30.0,
        max_bytes: int | None = None,
    ) -> list[Message]:
        check_queue_name(queue)
        check_receive(max_messages, wait_seconds, visibility_seconds, max_bytes)
        now = asyncio.get_running_loop().time
        deadline = now() + wait_seconds
        outage = _OUTAGE_BACKOFF.counter()
        # In line before the first look: a message between the look and the wait must not be missed.
        with self._wakeups.waiter(queue) as waiter:
            while True:
                # Before the look: a signal that comes during it may be about a message that it didn't see.
                waiter.signal.clear()
                try:
                    messages, full, due_in = await self._take(
                        queue, max_messages, visibility_seconds, max_bytes
                    )
                except Unavailable:
                    pause = outage.failed()
                    # The caller has time to wait, and an outage is often shorter than that.
                    if self._closed or now() + pause > deadline:
                        raise
                    await asyncio.sleep(pause)
                    continue
                if messages:
                    # There may be more, so the next receiver in line is woken as this one leaves.
                    if full:
                        waiter.signal.set()
                    return messages
                # Only dead letters were found, or the look didn't start at the front.
                if due_in == 0:
                    continue
                remaining = deadline - now()
                if remaining <= 0:
                    return []
                # Signals may get lost, and a delayed message sends none when its time comes.
                await waiter.wait(min(remaining, due_in, self._fallback_poll_seconds))

    async def _take(
        self, queue: str, max_messages: int, visibility_seconds: float, max_bytes: int | None
    ) -> tuple[list[Message], bool, float]:
        """Due messages, and whether they fill the batch; or none, and in how many seconds to look again (0 where
        there may be more right now)."""
        floor = self._floors.of(queue)
        rows = await self._fetch(
            _SQL.receive, queue, max_messages, visibility_seconds, self._max_receives, floor, max_bytes
        )
        messages = [
            Message(
                id=str(row["id"]),
                receipt=f"{row['id']}.{row['receipt'].hex}",
                body=orjson.loads(row["body"]),
                receive_count=row["receive_count"],
                enqueued_at=row["enqueued_at"],
            )
            for row in rows
            # Rows without a receipt are messages that were just buried, or the answer that nothing is due.
            if row["receipt"] is not None
        ]
        weight = sum(row["size"] or 0 for row in rows)
        full = len(messages) == max_messages or (max_bytes is not None and weight >= max_bytes)
        if full:
            self._floors.raise_to(queue, rows[0]["floor"], looked_from=floor)
        else:
            self._floors.drop(queue)
        if messages or rows[0]["id"] is not None or floor != FRONT:
            return messages, full, 0.0
        due_in = rows[0]["due_in"]
        # The next one may have become due since the statement looked; 0 would mean to look again at once.
        return [], False, float("inf") if due_in is None else max(_SHORTEST_WAIT, due_in)

    async def extend(self, receipts: Sequence[str], *, visibility_seconds: float) -> list[str]:
        check_seconds("visibility_seconds", visibility_seconds)
        stale, _ = await self._settle(_SQL.extend, receipts, visibility_seconds)
        return stale

    async def release(self, receipts: Sequence[str]) -> list[str]:
        stale, queues = await self._settle(_SQL.extend, receipts, 0.0)
        # They are visible now, and no publisher will signal that.
        for queue in queues:
            self._wakeups.announce(queue)
        return stale

    async def ack(self, receipts: Sequence[str], *, durable: bool = False) -> list[str]:
        stale, _ = await self._settle(_SQL.ack, receipts, _commit(durable))
        return stale

    async def dead_letter(self, receipts: Sequence[str], reason: str) -> list[str]:
        stale, _ = await self._settle(_SQL.dead_letter, receipts, reason)
        return stale

    async def _settle(
        self, query: str, receipts: Sequence[str], argument: object
    ) -> tuple[list[str], set[str]]:
        """Run a fenced statement; returns the receipts that matched nothing and the queues it touched."""
        # In the order of ids, so that two batches that share messages can't deadlock.
        parsed = sorted({_parse_receipt(receipt) for receipt in receipts})
        if not parsed:
            return [], set()
        rows = await self._fetch(query, [id_ for id_, _ in parsed], [token for _, token in parsed], argument)
        settled = {f"{row['id']}.{row['receipt'].hex}" for row in rows}
        return [receipt for receipt in receipts if receipt not in settled], {row["queue"] for row in rows}

    async def dead_letters(self, queue: str, *, limit: int = 100) -> list[DeadLetter]:
        check_queue_name(queue)
        rows = await self._fetch(_SQL.dead_letters, queue, limit)
        return [
            DeadLetter(
                id=str(row["id"]),
                body=orjson.loads(row["body"]),
                reason=row["reason"],
                receive_count=row["receive_count"],
                enqueued_at=row["enqueued_at"],
                dead_at=row["dead_at"],
            )
            for row in rows
        ]

    async def redrive(self, queue: str, ids: Sequence[str]) -> int:
        check_queue_name(queue)
        rows = await self._fetch(_SQL.redrive, queue, _parse_ids(ids))
        if rows:
            self._wakeups.announce(queue)
        return len(rows)

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        check_queue_name(queue)
        return len(await self._fetch(_SQL.discard, queue, _parse_ids(ids)))

    async def depth(self, queue: str) -> QueueDepth:
        check_queue_name(queue)
        return (await self.depths()).get(queue, QueueDepth())

    async def depths(self) -> dict[str, QueueDepth]:
        rows = await self._fetch(_SQL.depths)
        return {
            row["queue"]: QueueDepth(
                visible=row["visible"],
                in_flight=row["in_flight"],
                delayed=row["delayed"],
                dead=row["dead"],
                oldest_age_seconds=row["oldest_age_seconds"],
            )
            for row in rows
        }

    async def purge(self, queue: str) -> int:
        check_queue_name(queue)
        rows = await self._fetch(_SQL.purge, queue)
        return int(rows[0]["count"])

    async def _fetch(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        async with _outage_as_unavailable():
            return await self._pool.fetch(query, *arguments)


async def _nothing_to_reset(_connection: object) -> None:
    """No call changes its session, so that a release costs no round trip."""


@asynccontextmanager
async def _outage_as_unavailable() -> AsyncIterator[None]:
    try:
        yield
    except _OUTAGE as error:
        raise Unavailable("QueueUnavailable", f"the queue's database is not available: {error}") from error


def _commit(durable: bool) -> str:
    return "on" if durable else "off"


def _parse_receipt(receipt: str) -> tuple[int, UUID]:
    id_, _, token = receipt.partition(".")
    try:
        return _parse_id(id_), UUID(hex=token)
    except ValueError:
        raise Invalid("BadReceipt", "this is no receipt of this queue") from None


def _parse_ids(ids: Sequence[str]) -> list[int]:
    try:
        return [_parse_id(id_) for id_ in ids]
    except ValueError:
        raise Invalid("BadMessageId", "this is no id of a message of this queue") from None


def _parse_id(text: str) -> int:
    # int() also reads other scripts, spaces and underscores; 18 digits always fit a bigint.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ValueError(text)
    return int(text)


class Floors:
    """Where in a queue's index a receive may start to look."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._floors: dict[str, tuple[datetime, float]] = {}

    def of(self, queue: str) -> datetime:
        floor, expires = self._floors.get(queue, (FRONT, 0.0))
        return floor if self._monotonic() < expires else FRONT

    def drop(self, queue: str) -> None:
        self._floors.pop(queue, None)

    def raise_to(self, queue: str, floor: datetime, *, looked_from: datetime) -> None:
        """After a full batch; only a look from the front starts a new second."""
        if looked_from == FRONT:
            self._floors[queue] = floor, self._monotonic() + _FLOOR_SECONDS
        # A floor that another receiver dropped meanwhile stays dropped: the front has to be looked at again.
        elif queue in self._floors:
            self._floors[queue] = floor, self._floors[queue][1]
