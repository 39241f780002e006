"""Commits to the data database: fenced, in one transaction with what must be said about them.

The order is the promise: an attempt writes its fence first, operators then load staging tables by the login of
their attempt's ticket (``tickets``), and ``commit``
makes them the dataset's rows only if no newer attempt has written a fence for those blocks meanwhile. What follows
(a cursor event, an invalidation) is kept in the same transaction and handed out by ``unsaid`` until ``said``, so
that a crash between the data and its event loses neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import structlog

from tracelake import sqlfiles
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.domain.table_layout import PLAIN, TableLayout
from tracelake.postgres_sessions import KEEPALIVES, end_transactions_after
from tracelake.secret import Secret

_SQL = sqlfiles.load("tracelake.hot", "sql/commit.sql")
_COMMAND_SECONDS = 600
# Before the shortest of the limits on waiting for a lock that functions of the data database set for themselves.
_PATIENCE_SECONDS = 0.5
_PAUSE_SECONDS = 1.0
_STALE = "TL001"
_UNFIT = "TL002"
_LOST = "TL003"
# Sent as text: the database compares revisions as numbers.
Revisions = dict[str, int]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """An attempt as the data database knows it: its epoch, and the revisions of what it read."""

    task_id: UUID
    epoch: int
    inputs: Revisions


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedOutput:
    """An output's staged rows: staging tables, which have its ``output_index`` in their names, and how many rows
    each has. Without tables the range is emptied. ``unique_key`` is set for an output that appends."""

    dataset_version: UUID
    output_index: int
    tables: tuple[tuple[str, int], ...] = ()
    layout: TableLayout = PLAIN
    kept: bool = False
    appends: bool = False
    unique_key: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unsaid:
    """``inputs`` are the revisions that the commit was made from."""

    outbox_id: int
    events: list[EventIn]
    inputs: Revisions


class HotStore:
    """Opened with the writer's DSN, which operators never see."""

    def __init__(self, dsn: Secret) -> None:
        self.dsn = dsn
        self._pool: asyncpg.Pool[Any] | None = None

    async def begin(self, writer: Writer, version: UUID, span: BlockRange) -> None:
        """Write the fence. ``Conflict`` when a newer attempt has been here."""
        async with self.connection() as connection:
            written = await connection.fetchval(
                _SQL.begin, version, writer.task_id, writer.epoch, span.start, span.end, _json(writer.inputs)
            )
            if not written:
                raise _stale()

    async def commit(
        self, writer: Writer, outputs: Sequence[StagedOutput], span: BlockRange, events: Sequence[EventIn]
    ) -> list[int]:
        """All outputs and what follows, or nothing; answers how many rows each has got."""
        async with self.connection() as connection, connection.transaction():
            rows = {
                output.dataset_version: await self._commit_one(connection, writer, output, span)
                for output in sorted(outputs, key=lambda output: output.dataset_version)
            }
            if events:
                await connection.execute(_SQL.say, writer.task_id, _json(list(events)), _json(writer.inputs))
        return [rows[output.dataset_version] for output in outputs]

    async def unsaid(self, task_id: UUID) -> list[Unsaid]:
        """What this task's commits have to say and the Dispatcher hasn't accepted yet, oldest first."""
        async with self.connection() as connection:
            found = await connection.fetch(_SQL.unsaid, task_id)
        return [
            Unsaid(
                row["outbox_id"],
                msgspec.json.decode(row["events"], type=list[EventIn]),
                msgspec.json.decode(row["inputs"], type=Revisions),
            )
            for row in found
        ]

    async def said(self, outbox_id: int) -> None:
        async with self.connection() as connection:
            await connection.execute(_SQL.said, outbox_id)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def _commit_one(
        self, connection: Any, writer: Writer, output: StagedOutput, span: BlockRange
    ) -> int:
        inserted: int = await connection.fetchval(
            _SQL.commit,
            output.dataset_version,
            writer.task_id,
            writer.epoch,
            _json(writer.inputs),
            span.start,
            span.end,
            [name for name, _ in output.tables],
            [rows for _, rows in output.tables],
            output.kept,
            output.appends,
            list(output.unique_key),
            _json(output.layout),
            output.output_index,
        )
        return inserted

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """Errors of the database in the platform's own terms."""
        try:
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self.dsn.reveal(),
                    min_size=0,
                    max_size=4,
                    command_timeout=_COMMAND_SECONDS,
                    init=end_transactions_after(_COMMAND_SECONDS + 60),
                    reset=_reset,
                    server_settings={**KEEPALIVES, "application_name": "tracelake-worker"},
                )
            async with self._pool.acquire() as connection, self._freed(connection.get_server_pid()):
                yield connection
        except asyncpg.PostgresError as error:
            raise _meaning(error) from error
        except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            # A connection that ends between two statements may show as either of the driver's own errors.
            raise Unavailable("DataUnavailable", f"the data database can't be reached: {error}") from error

    @asynccontextmanager
    async def _freed(self, pid: int) -> AsyncIterator[None]:
        """A guest can leave a transaction open that this session waits for: then another one ends the guest's."""
        looking: set[asyncio.Task[None]] = set()

        def begin_to_look() -> None:
            looking.add(asyncio.create_task(self._end_blockers(pid)))

        timer = asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, begin_to_look)
        try:
            yield
        finally:
            timer.cancel()
            for task in looking:
                task.cancel()

    async def _end_blockers(self, pid: int) -> None:
        """Again and again, by a session that isn't the pool's: all of those may be waiting."""
        try:
            asking: asyncpg.Connection[Any] = await asyncpg.connect(self.dsn.reveal(), timeout=10)
            try:
                while True:
                    if ended := await asking.fetchval(_SQL.end_blockers, pid):
                        log.warning("sessions that held up the platform were ended", sessions=ended)
                    await asyncio.sleep(_PAUSE_SECONDS)
            finally:
                asking.terminate()
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            log.debug("can't look who holds up the platform", error=str(error))


async def _reset(connection: Any) -> None:
    """Nothing here changes a session, and a round trip more for every statement is felt at the tip of a chain."""
    if connection.is_in_transaction():
        await connection.reset()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _stale() -> Conflict:
    return Conflict("StaleEpoch", "a newer attempt has begun on these blocks")


def _meaning(error: asyncpg.PostgresError) -> Conflict | Invalid | Unavailable:
    code = str(error.sqlstate or "")
    if code == _STALE:
        return _stale()
    if code == _UNFIT:
        return Invalid("RowsUnfit", str(error))
    if code == _LOST:
        return Unavailable("StagedRowsLost", f"what was staged isn't there any more: {error}")
    if code[:2] in ("22", "23", "42"):
        return Invalid("RowsRefused", f"the data database refuses the rows: {error}")
    return Unavailable("DataUnavailable", f"the data database failed: {error}")
