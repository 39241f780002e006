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
from psycopg import sql

from tracelake import sqlfiles
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.operators.data_database import connect
from tracelake.secret import Secret

T = TypeVar("T")

_SQL = sqlfiles.load("tracelake.query", "sql/snapshot.sql")
_CANCEL_SECONDS = 5.0
_AGAIN_SECONDS = 0.1


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
        while self._idle:
            self._idle.pop().close()

    def _begin(self, dsn: Secret, seconds: float) -> psycopg.Connection:
        """By a connection that was kept, or by a new one where those that were kept have died."""
        begin = sql.SQL(_SQL.begin).format(limit=sql.Literal(max(1, int(seconds * 1000))))
        while self._idle:
            kept = self._idle.pop()
            try:
                kept.execute(begin)
                return kept
            except psycopg.Error:
                kept.close()
        connection = connect(dsn.reveal())
        try:
            connection.execute(begin)
        except psycopg.Error as error:
            connection.close()
            raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error
        return connection

    def _end(self, connection: psycopg.Connection) -> None:
        try:
            connection.execute(_SQL.end)
        except psycopg.Error:
            connection.close()
        if not connection.closed:
            self._idle.append(connection)
