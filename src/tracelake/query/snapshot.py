"""The data database as queries read it: one snapshot per query, by the role that can only read.

Connections are kept between queries, since opening one costs more than most reads. The driver blocks, so its work
is done in threads, one for each connection; a query that is given up is canceled in the database as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import psycopg
import structlog
from psycopg import sql

from tracelake import sqlfiles
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.operators.data_database import connect
from tracelake.secret import Secret

T = TypeVar("T")

_SQL = sqlfiles.load("tracelake.query", "sql/snapshot.sql")
_CANCEL_SECONDS = 5.0
_AGAIN_SECONDS = 0.1

log = structlog.get_logger(__name__)


class Snapshot:
    """What was committed at one moment, while the context that gave it lasts."""

    def __init__(self, connection: psycopg.Connection, threads: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._threads = threads

    async def run(self, work: Callable[[psycopg.Connection], T]) -> T:
        """Work with the connection, in a thread. When the caller is canceled, so is the statement, and the work has
        ended before that is raised."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, self._connection)
        try:
            return await asyncio.shield(running)
        except Unavailable as error:
            if isinstance(error.__cause__, psycopg.errors.QueryCanceled):
                raise Invalid("QueryTimeout", "the time was over before all hot rows were read") from error
            raise _unavailable(error) from error
        except Invalid as error:
            if state := _sqlstate(error.__cause__):
                log.warning("the data database refused what a query asks of it", sqlstate=state)
                raise Invalid(
                    "QueryFailed", "a condition of the query is more than the data database can compare"
                ) from error
            raise
        except asyncio.CancelledError:
            await self._cancel(running)
            raise

    async def _cancel(self, running: asyncio.Future[Any]) -> None:
        """Said again until it has ended: a word that comes between two statements cancels neither."""
        while not running.done():
            with suppress(psycopg.Error):
                await asyncio.to_thread(self._connection.cancel_safe, timeout=_CANCEL_SECONDS)
            await asyncio.wait([running], timeout=_AGAIN_SECONDS)
        with suppress(Exception):
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
                "NoDataDatabase", "this service reads no hot tables: set TRACELAKE_READING_DSN for it"
            )
        return self._dsn

    @asynccontextmanager
    async def snapshot(self, seconds: float) -> AsyncIterator[Snapshot]:
        """Taken on entering. ``seconds`` is how long all may take, the wait for a connection included."""
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
                await asyncio.wait([begun])
                if begun.exception() is None:
                    begun.result().close()
                raise
            try:
                yield Snapshot(connection, self._threads)
            finally:
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
        """By a connection that was kept, or by a new one where those that were kept have died."""
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
        """Asked for by several threads at once."""
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
    """For whoever asks, who isn't told of hosts, roles and databases. The log is, but not of what the database says
    of a statement, which has values of the query in it."""
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
