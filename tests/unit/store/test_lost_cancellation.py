"""A transaction that rolls back after an error, and is cancelled meanwhile, ends as cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tracelake.store.db import Connection, Database, Transaction


class HangsAtRollback:
    """A connection whose statements fail, and whose server has gone when it is asked to roll back."""

    def __init__(self) -> None:
        self.rolling_back = asyncio.Event()
        self.terminated = False

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        raise asyncpg.SerializationError("again")

    async def execute(self, query: str, *args: Any) -> str:
        if query == "ROLLBACK":
            self.rolling_back.set()
            await asyncio.Event().wait()
        return ""

    def is_closed(self) -> bool:
        return False

    def terminate(self) -> None:
        self.terminated = True


class OneConnection:
    def __init__(self, connection: HangsAtRollback) -> None:
        self._connection = connection

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        yield self._connection


async def test_a_cancellation_during_a_rollback_is_not_lost() -> None:
    connection = HangsAtRollback()
    database = Database(OneConnection(connection))

    async def work(tx: Transaction) -> None:
        await tx.fetch("SELECT 1")

    running = asyncio.create_task(database.run(work))
    async with asyncio.timeout(60):
        await connection.rolling_back.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert connection.terminated
