"""Two steps at once, in an order that the test chooses.

One step runs until just before a statement at which it is held (its ``COMMIT`` by default), with all locks it
has taken by then. The other starts and runs until it has finished or waits for a lock. Then the first
continues. Nothing is left to chance, so each order of a race is a test of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import asyncpg

from tests.support.conversation import Conversation
from tracelake.domain.errors import TracelakeError
from tracelake.store.db import Connection, Database, Row

A = TypeVar("A")
B = TypeVar("B")

COMMIT = "COMMIT"
_PATIENCE_SECONDS = 20.0


class Hold:
    """Stops the first session that is about to run ``query``, once."""

    def __init__(self, query: str) -> None:
        self._query = query
        self._used = False
        self.reached = asyncio.Event()
        self.released = asyncio.Event()

    async def pass_by(self, query: str) -> None:
        if query == self._query and not self._used:
            self._used = True
            self.reached.set()
            await self.released.wait()


class _HeldConnection:
    """A session's statements pass by the hold; the commit of one that has locked nothing doesn't."""

    def __init__(self, connection: Connection, hold: Hold) -> None:
        self._connection = connection
        self._hold = hold
        self._locked = False

    async def fetch(self, query: str, *args: Any) -> list[Row]:
        await self._pass_by(query)
        return await self._connection.fetch(query, *args)

    async def execute(self, query: str, *args: Any) -> str:
        await self._pass_by(query)
        return await self._connection.execute(query, *args)

    async def _pass_by(self, query: str) -> None:
        if query != COMMIT or self._locked:
            await self._hold.pass_by(query)
        self._locked = self._locked or "UPDATE" in query or "LOCK TABLE" in query

    def is_closed(self) -> bool:
        return self._connection.is_closed()

    def terminate(self) -> None:
        self._connection.terminate()


class _HeldConnections:
    def __init__(self, pool: asyncpg.Pool, hold: Hold) -> None:
        self._pool = pool
        self._hold = hold

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        async with self._pool.acquire() as connection:
            yield _HeldConnection(connection, self._hold)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[A, B]):
    """What each of the two got, an error of ours as a value; and whether the second had to wait."""

    first: A | TracelakeError
    second: B | TracelakeError
    second_waited: bool


class Interleaver:
    def __init__(self, talk: Conversation, pool: asyncpg.Pool) -> None:
        self._talk = talk
        self._pool = pool

    async def run(
        self,
        first: Callable[[Conversation], Awaitable[A]],
        second: Callable[[Conversation], Awaitable[B]],
        *,
        hold: str = COMMIT,
    ) -> Outcome[A, B]:
        """Hold ``first`` before ``hold``, let ``second`` get as far as it can, then let both finish."""
        stop = Hold(hold)
        held = Conversation(replace(self._talk.ctx, db=Database(_HeldConnections(self._pool, stop))))
        early = asyncio.ensure_future(_caught(first(held)))
        late: asyncio.Future[B | TracelakeError] | None = None
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await _either(early, stop.reached)
                assert stop.reached.is_set(), f"never came to: {hold[:80]}"
                late = asyncio.ensure_future(_caught(second(self._talk)))
                waited = await self._finished_or_waiting(late)
                stop.released.set()
                return Outcome(await early, await late, waited)
        finally:
            stop.released.set()
            for task in (early, late):
                if task is not None and not task.done():
                    task.cancel()

    async def _finished_or_waiting(self, task: asyncio.Future[Any]) -> bool:
        while not task.done():
            if await self._talk.has_waiting_session():
                return True
            await asyncio.wait([task], timeout=0.01)
        return False


async def _either(task: asyncio.Future[Any], event: asyncio.Event) -> None:
    reached = asyncio.ensure_future(event.wait())
    await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
    reached.cancel()


async def _caught(step: Awaitable[A]) -> A | TracelakeError:
    try:
        return await step
    except TracelakeError as error:
        return error
