"""Database sessions that ask the scheduler before every statement.

``Database`` needs fetch, execute, is_closed and terminate of a connection. A simulated process that dies takes
its session with it; here the session is rolled back instead, as the server would do, and used again: a new one
for each death would cost more than everything else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import asyncpg

from tests.support.simulation.scheduler import HeldBackends, Scheduler
from tracelake.postgres import sqlfiles
from tracelake.store.db import Connection, Row, prepare_connection

SQL = sqlfiles.load("tests.support.simulation", "simulation.sql")


async def open_session(dsn: str, held: HeldBackends) -> asyncpg.Connection:
    """Waits are the scheduler's business, so nothing times out; plans must not depend on earlier seeds."""
    connection = await asyncpg.connect(
        dsn,
        server_settings={
            "application_name": "simulation",
            "statement_timeout": "0",
            "lock_timeout": "0",
            "deadlock_timeout": "1ms",
            "synchronous_commit": "off",
            "plan_cache_mode": "force_generic_plan",
            "timezone": "UTC",
            "jit": "off",
        },
    )
    await prepare_connection(connection)
    [(database, client_port)] = await connection.fetch(SQL.own_session)
    held.know(connection.get_server_pid(), database, client_port)
    return connection


class SimConnection:
    """One session on loan to a simulated process."""

    def __init__(self, scheduler: Scheduler, raw: asyncpg.Connection) -> None:
        self._scheduler = scheduler
        self._raw = raw
        self._lost = False
        self.pid: int = raw.get_server_pid()

    async def fetch(self, query: str, *args: Any) -> list[Row]:
        rows: list[Row] = await self._turn(query, lambda: self._raw.fetch(query, *args))
        return rows

    async def execute(self, query: str, *args: Any) -> str:
        tag: str = await self._turn(query, lambda: self._raw.execute(query, *args))
        return tag

    def is_closed(self) -> bool:
        return self._lost

    def terminate(self) -> None:
        self._lost = True

    async def lose(self) -> None:
        self._lost = True
        await self._raw.execute("ROLLBACK")

    async def _turn(self, query: str, run: Callable[[], Awaitable[Any]]) -> Any:
        releases = query in ("COMMIT", "ROLLBACK")
        return await self._scheduler.turn(label(query), run, link=self, releases=releases)


class SimConnections:
    """Sessions for simulated processes, handed out in a fixed order."""

    def __init__(
        self, scheduler: Scheduler, free: list[asyncpg.Connection], dsn: str, held: HeldBackends
    ) -> None:
        self._scheduler = scheduler
        self._free = free
        self._dsn = dsn
        self._held = held

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        raw = self._free.pop() if self._free else await open_session(self._dsn, self._held)
        try:
            yield SimConnection(self._scheduler, raw)
        finally:
            self._free.append(raw)


class Observer:
    """A session of the simulation's own: the clock, who waits for whom, and what a reader would see."""

    def __init__(self, raw: asyncpg.Connection, held: HeldBackends) -> None:
        self._raw = raw
        self._held = held

    def hold(self, pid: int) -> None:
        self._held.hold(pid)

    def let_go(self, pid: int) -> None:
        self._held.let_go(pid)

    async def own_the_time(self) -> None:
        await self._raw.execute(SQL.own_the_time)
        await self._raw.execute(SQL.watch_holds)

    async def begin(self, now: datetime) -> None:
        await self._raw.execute(SQL.forget_everything)
        await self._raw.execute(SQL.start_clock, now)

    async def set_clock(self, now: datetime) -> None:
        await self._raw.execute(SQL.set_clock, now)

    async def blockers(self, pids: list[int]) -> dict[int, list[int]]:
        rows = await self._raw.fetch(SQL.blockers, pids)
        return {row["pid"]: list(row["blockers"]) for row in rows}

    async def read(self, query: str, *args: Any) -> list[Row]:
        rows: list[Row] = await self._raw.fetch(query, *args)
        return rows


def label(query: str) -> str:
    """A query's own line of why, or how it begins."""
    first = query.partition("\n")[0]
    return first.removeprefix("-- ")
