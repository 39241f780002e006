"""Hot rows for queries: read from the data database in one snapshot per query, into sealed memory.

``HotDatabase`` connects as the role that can only read. It keeps connections between queries, since opening one
costs more than most reads. The driver blocks, so its work is done in threads, one for each connection; canceling a
query also cancels its statement in the database.

``read_rows`` reads only the columns that the query uses, and lets the database leave out rows. The rows come in the
types that the dataset has in files, so that hot and cold rows are rows of one table. The number of bytes is
limited: hot tables are for recent rows, and a query that needs more is refused with advice on how to ask for less.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from typing import Any, BinaryIO, TypeVar
from uuid import UUID

import msgspec
import psycopg
import pyarrow as pa
import structlog
from psycopg import sql

from tracelake.domain.block_range import BlockRange
from tracelake.domain.buffers import PLATFORM_COLUMNS, POSTGRES_TYPES, BufferSchema
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.operators.catalog import CATALOG
from tracelake.domain.where import Predicate
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.postgres import sqlfiles
from tracelake.query.catalog import ResolvedRelation
from tracelake.query.engine.attach import sealed_memory
from tracelake.settings import Secret
from tracelake.tables.data_database import connect
from tracelake.tables.postgres_scan import PostgresScan, reading_errors, scan_of_table
from tracelake.tables.scope import BLOCK_COLUMN
from tracelake.tables.stored_types import arrow_type
from tracelake.tables.wide_integers import storage_of

T = TypeVar("T")
_SQL = sqlfiles.load("tracelake.query", "sql/snapshot.sql")
_CANCEL_SECONDS = 5.0
_CANCEL_AGAIN_SECONDS = 0.1
_CHAIN_OPERATORS = frozenset(spec.name for spec in CATALOG.values() if spec.chain_tables)

log = structlog.get_logger(__name__)


class HotSnapshot:
    """The committed rows at one moment; valid inside the context of ``HotDatabase.snapshot``."""

    def __init__(self, connection: psycopg.Connection, threads: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._threads = threads

    async def run(self, work: Callable[[psycopg.Connection], T]) -> T:
        """Call ``work`` with the connection, in a thread. Canceling the caller cancels the statement too, and is
        raised after the work has ended."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, self._connection)
        try:
            # A thread can't be canceled, and its connection must not be used by another query while it runs.
            return await asyncio.shield(running)
        except Unavailable as error:
            if isinstance(error.__cause__, psycopg.errors.QueryCanceled):
                raise Invalid("QueryTimeout", "the time ran out before all hot rows were read") from error
            raise _unavailable(error) from error
        except Invalid as error:
            if state := _sqlstate(error.__cause__):
                log.warning("the data database refused a query's condition", sqlstate=state)
                raise Invalid(
                    "QueryFailed", "the data database can't evaluate a condition of the query"
                ) from error
            raise
        except asyncio.CancelledError:
            await self._cancel(running)
            raise

    async def _cancel(self, running: asyncio.Future[Any]) -> None:
        """Repeats the cancellation until the work has ended: one that arrives between two statements cancels
        neither."""
        while not running.done():
            with suppress(psycopg.Error):
                await asyncio.to_thread(self._connection.cancel_safe, timeout=_CANCEL_SECONDS)
            await asyncio.wait([running], timeout=_CANCEL_AGAIN_SECONDS)
        with suppress(Exception):
            # Read only so that asyncio doesn't log it as an exception that was never retrieved.
            running.result()


class HotDatabase:
    """Connects when it is first needed. ``dsn`` is None for a service without hot tables."""

    def __init__(self, dsn: Secret | None, *, connections: int = 4) -> None:
        self._dsn = dsn
        self._free = asyncio.Semaphore(connections)
        self._idle: list[psycopg.Connection] = []
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="hot-rows")

    @property
    def dsn(self) -> Secret:
        if self._dsn is None:
            raise Unavailable(
                "NoDataDatabase", "this service reads no hot tables: set TRACELAKE_DATA_READ_DSN for it"
            )
        return self._dsn

    @asynccontextmanager
    async def snapshot(self, seconds: float) -> AsyncIterator[HotSnapshot]:
        """Taken on entering. ``seconds`` limits the whole, the wait for a connection included."""
        dsn = self.dsn
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable("DataBusy", "too many queries read hot tables at once") from None
        try:
            begun = asyncio.get_running_loop().run_in_executor(self._threads, self._begin, dsn, seconds)
            try:
                connection = await asyncio.shield(begun)
            except asyncio.CancelledError:
                # A thread can't be canceled, and its connection must not be lost.
                await asyncio.wait([begun])
                if begun.exception() is None:
                    begun.result().close()
                raise
            try:
                yield HotSnapshot(connection, self._threads)
            finally:
                # Also for a canceled query: a snapshot that stays
                # open keeps the database from removing dead rows.
                await asyncio.shield(asyncio.to_thread(self._end, connection))
        finally:
            self._free.release()

    async def check(self) -> None:
        """For readiness: raises ``Unavailable`` when the data database can't be read now."""
        if self._dsn is not None:
            async with self.snapshot(5.0):
                pass

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while (kept := self._kept()) is not None:
            kept.close()

    def _begin(self, dsn: Secret, seconds: float) -> psycopg.Connection:
        """Begin the snapshot on a kept connection, or on a new one if all kept ones have died."""
        # At least 1 ms, since Postgres takes a timeout of 0 for none.
        begin = sql.SQL(_SQL.begin).format(limit=sql.Literal(max(1, int(seconds * 1000))))
        while (kept := self._kept()) is not None:
            try:
                kept.execute(begin)
                return kept
            except psycopg.Error:
                kept.close()
        try:
            connection = connect(dsn.reveal())
        except Unavailable as error:
            raise _unavailable(error) from None
        try:
            connection.execute(begin)
        except psycopg.Error as error:
            connection.close()
            raise _unavailable(error) from error
        return connection

    def _kept(self) -> psycopg.Connection | None:
        """A kept connection, or None. Several threads call it at once, and ``list.pop`` is atomic."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _end(self, connection: psycopg.Connection) -> None:
        try:
            connection.execute(_SQL.end)
        except psycopg.Error:
            connection.close()
        if not connection.closed:
            self._idle.append(connection)


def _sqlstate(error: BaseException | None) -> str:
    return (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""


def _unavailable(error: Exception) -> Unavailable:
    """The error for the caller, without hosts, roles and databases. These go to the log; the database's message
    about a statement doesn't, since it quotes values of the query."""
    cause = error.__cause__ if isinstance(error, Unavailable) and error.__cause__ is not None else error
    state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    lost = isinstance(cause, Unavailable) or (isinstance(cause, psycopg.OperationalError) and state is None)
    log.warning(
        "the data database can't be read",
        error=type(cause).__name__,
        sqlstate=state,
        detail=str(cause) if lost else None,
    )
    if isinstance(error, Unavailable) and error.reason != "DataUnavailable":
        return error
    return Unavailable("DataUnavailable", "the data database can't be read now; try again")


class HotRowsTooMany(Exception):
    """The rows have more bytes than allowed; the rest wasn't read."""


def find_table(connection: psycopg.Connection, version: UUID) -> PostgresScan | None:
    """The hot table of a version as the snapshot has it; None if nothing has been committed to it yet."""
    return scan_of_table(connection, version, Secret(""), "")


def known_columns(relation: ResolvedRelation) -> pa.Schema | None:
    """The columns that a relation without any rows will have, where they are declared; otherwise None."""
    if relation.buffer_schema is not None:
        return buffered_columns(relation.buffer_schema)
    known = {dataset.value: dataset for dataset in ChainTable}
    if relation.operator in _CHAIN_OPERATORS and relation.output_name in known:
        return TABLES[known[relation.output_name]].arrow
    return None


def buffered_columns(schema: BufferSchema) -> pa.Schema:
    """The platform's own columns and the declared ones."""
    types = {column.name: POSTGRES_TYPES[column.type] for column in schema.columns}
    return pa.schema([(name, arrow_type(kind)) for name, kind in {**PLATFORM_COLUMNS, **types}.items()])


def narrowed(
    scan: PostgresScan,
    columns: Sequence[str],
    predicate: Predicate | None,
    spans: Sequence[BlockRange] | None,
) -> PostgresScan:
    """The scan of only the needed rows, and of those ``columns`` that the table has."""
    if spans is not None and not scan.has_blocks:
        raise Invalid(
            "NotCut",
            f"the hot rows have no column {BLOCK_COLUMN}, so they can't be separated from the cold rows",
        )
    own = set(scan.whole.names)
    return replace(
        scan,
        columns=tuple(name for name in columns if name in own) or (scan.whole.names[0],),
        where=None if predicate is None else msgspec.json.encode(predicate),
        decides=False,
        spans=None if spans is None else tuple(spans),
    )


def read_rows(
    scan: PostgresScan, connection: psycopg.Connection, types: pa.Schema, max_bytes: int
) -> int | None:
    """A descriptor of sealed memory with the rows as an Arrow stream, in the relation's types; None when there are
    no rows. Raises ``HotRowsTooMany`` as soon as they have more than ``max_bytes``."""
    target = pa.schema([(name, storage_of(types.field(name).type)) for name in scan.schema.names])
    rows = 0

    def write(file: BinaryIO) -> None:
        nonlocal rows
        with closing(_cast(scan.read(connection), target)) as batches:
            rows = _write(batches, target, file, max_bytes)

    memory = sealed_memory("hot-rows", write)
    if not rows:
        os.close(memory)
        return None
    return memory


def _write(batches: Iterator[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, max_bytes: int) -> int:
    rows = size = 0
    with pa.ipc.new_stream(file, schema) as out:
        for batch in batches:
            rows += batch.num_rows
            size += batch.nbytes
            if size > max_bytes:
                raise HotRowsTooMany
            out.write_batch(batch)
    return rows


def _cast(batches: Iterator[pa.RecordBatch], target: pa.Schema) -> Generator[pa.RecordBatch, None, None]:
    with reading_errors():
        for batch in batches:
            if batch.num_rows:
                yield batch if batch.schema.equals(target) else batch.cast(target)
