"""Commits to the data database: fenced, in one transaction with the events that follow from them.

The order is the promise. An attempt writes its fence first; operators then load staging tables by the login of
their attempt's ticket (``tickets``); ``commit`` makes the staged rows the dataset's only if no newer attempt has
written a fence for those blocks meanwhile. The events that follow (a cursor event, an invalidation) are recorded
in the same transaction and stay pending until ``mark_delivered``, so that a crash between the data and its event
loses neither.
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

from tracelake.contracts.dispatcher_api import EventIn
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.domain.table_layout import PLAIN, TableLayout
from tracelake.postgres import sqlfiles
from tracelake.postgres.sessions import KEEPALIVES, end_transactions_after
from tracelake.settings import Secret

_SQL = sqlfiles.load("tracelake.hot", "sql/commit.sql")
_COMMAND_SECONDS = 600
# Before the shortest of the limits on waiting for a lock that functions of the data database set for themselves.
_PATIENCE_SECONDS = 0.5
_PAUSE_SECONDS = 1.0
# Error codes that functions of the data database raise.
_STALE = "TL001"
_UNFIT = "TL002"
_LOST = "TL003"
REFUSED = "RowsRefused"
# Sent as text: the database compares revisions as numbers.
Revisions = dict[str, int]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """How one kind of writer words the refusals of the data database.

    ``rows_at_fault`` are the classes of errors that the rows cause, which are refused again; all others come from
    the database's state and may pass.
    """

    stale: str
    unfit: str
    unfit_prefix: str = ""
    rows_at_fault: tuple[str, ...]


_REFUSALS = Refusals(
    stale="a newer attempt has begun on these blocks",
    unfit="RowsUnfit",
    # Values, constraints, names and types.
    rows_at_fault=("22", "23", "42"),
)


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
class PendingEvents:
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
        """Write the fence. ``Conflict`` when a newer attempt has written one."""
        async with self.connection() as connection:
            written = await connection.fetchval(
                _SQL.begin, version, writer.task_id, writer.epoch, span.start, span.end, _json(writer.inputs)
            )
            # Refused before anything is loaded: this attempt's rows could never be committed.
            if not written:
                raise Conflict("StaleEpoch", _REFUSALS.stale)

    async def commit(
        self, writer: Writer, outputs: Sequence[StagedOutput], span: BlockRange, events: Sequence[EventIn]
    ) -> list[int]:
        """Commit all outputs and record the events, or nothing; returns how many rows each output got."""
        async with self.connection() as connection, connection.transaction():
            # In the order of versions, so that two commits that share outputs can't deadlock.
            rows = {
                output.dataset_version: await self._commit_one(connection, writer, output, span)
                for output in sorted(outputs, key=lambda output: output.dataset_version)
            }
            # In the transaction of the rows: a crash leaves both, or neither.
            if events:
                await connection.execute(
                    _SQL.record_events, writer.task_id, _json(list(events)), _json(writer.inputs)
                )
        return [rows[output.dataset_version] for output in outputs]

    async def pending_events(self, task_id: UUID) -> list[PendingEvents]:
        """Events of this task's commits that the Dispatcher hasn't accepted yet, oldest first."""
        async with self.connection() as connection:
            found = await connection.fetch(_SQL.pending_events, task_id)
        return [
            PendingEvents(
                row["outbox_id"],
                msgspec.json.decode(row["events"], type=list[EventIn]),
                msgspec.json.decode(row["inputs"], type=Revisions),
            )
            for row in found
        ]

    async def mark_delivered(self, outbox_id: int) -> None:
        async with self.connection() as connection:
            await connection.execute(_SQL.mark_delivered, outbox_id)

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
        """A connection of the pool; the database's errors are raised as the platform's own."""
        try:
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self.dsn.reveal(),
                    # A worker that touches no hot tables opens no
                    # connection, and starts while the database is away.
                    min_size=0,
                    max_size=4,
                    command_timeout=_COMMAND_SECONDS,
                    # Beyond the client's own limit, so that it only ends sessions whose client is gone.
                    init=end_transactions_after(_COMMAND_SECONDS + 60),
                    reset=_reset,
                    server_settings={**KEEPALIVES, "application_name": "tracelake-worker"},
                )
            async with self._pool.acquire() as connection, self._freed(connection.get_server_pid()):
                yield connection
        except asyncpg.PostgresError as error:
            raise meaning(error, _REFUSALS) from error
        except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            # A connection that ends between two statements may show as either of the driver's own errors.
            raise Unavailable("DataUnavailable", f"the data database can't be reached: {error}") from error

    @asynccontextmanager
    async def _freed(self, pid: int) -> AsyncIterator[None]:
        """A guest can leave a transaction open that this session waits for: then a second session ends the
        guest's."""
        looking: set[asyncio.Task[None]] = set()

        def begin_to_look() -> None:
            # Held in a set: the event loop's own reference to a task is weak.
            looking.add(asyncio.create_task(self._end_blockers(pid)))

        # Nearly every call is done before, and costs no second session.
        timer = asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, begin_to_look)
        try:
            yield
        finally:
            timer.cancel()
            for task in looking:
                task.cancel()

    async def _end_blockers(self, pid: int) -> None:
        """Repeat it by a session outside of the pool, all of whose sessions may be waiting."""
        try:
            asking: asyncpg.Connection[Any] = await asyncpg.connect(self.dsn.reveal(), timeout=10)
            try:
                while True:
                    if ended := await asking.fetchval(_SQL.end_blockers, pid):
                        _log.warning("blocking sessions terminated", sessions=ended)
                    await asyncio.sleep(_PAUSE_SECONDS)
            finally:
                # This task is ended by a cancel, and a close in order would be one more wait.
                asking.terminate()
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            _log.debug("cannot find blocking sessions", error=str(error))


async def _reset(connection: Any) -> None:
    """No call changes its session, and one more round trip for every statement would delay the tip of a chain."""
    if connection.is_in_transaction():
        await connection.reset()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def meaning(error: asyncpg.PostgresError, refusals: Refusals) -> Conflict | Invalid | Unavailable:
    """The error of our tree that an error of the data database stands for."""
    code = str(error.sqlstate or "")
    if code == _STALE:
        return Conflict("StaleEpoch", refusals.stale)
    if code == _UNFIT:
        return Invalid(refusals.unfit, f"{refusals.unfit_prefix}{error}")
    if code == _LOST:
        return Unavailable("StagedRowsLost", f"staged rows are missing: {error}")
    if code[:2] in refusals.rows_at_fault:
        return Invalid(REFUSED, f"the data database refuses the rows: {error}")
    return Unavailable("DataUnavailable", f"the data database failed: {error}")
