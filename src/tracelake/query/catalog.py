"""What the Query Service knows of the state database: through views that show what is committed, and nothing else.

Everything that a query needs comes in one statement, so it is of one moment and costs one round trip. Nothing of it
is remembered but whose a bearer token is, for a few seconds: that long a revoked one still works.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import structlog
from asyncpg.pool import PoolConnectionProxy

from tracelake import sqlfiles
from tracelake.domain.errors import Unavailable
from tracelake.domain.task import Outcome, TaskStatus
from tracelake.pool_end import close_pool
from tracelake.query.caller import UserCaller
from tracelake.query.relation import ResolvedRelation, WantedBlocks
from tracelake.query.state_pool import CLOSE_SECONDS, STATE_ERRORS, open_pool
from tracelake.secret import Secret
from tracelake.tokens.user_tokens import hash_token, looks_like_token

log = structlog.get_logger(__name__)

USER_SECONDS = 5.0
MAX_USERS = 1024
MAX_NAMES = 1000
_ACQUIRE_SECONDS = 10.0

_SQL = sqlfiles.load("tracelake.query", "sql/catalog.sql")


class TaskNow(msgspec.Struct, frozen=True):
    """A task as it stands: which attempt is its last, and how that ended if it did."""

    task_id: UUID
    attempt: int
    status: TaskStatus
    last_outcome: Outcome | None


class Wanted(msgspec.Struct, frozen=True):
    """A relation to look for: by its published name, or the version that a token pins it to."""

    name: str
    version: UUID | None
    blocks: WantedBlocks


class Look(msgspec.Struct, frozen=True):
    """What the catalog said at one moment; of ``relations``, those that exist."""

    task: TaskNow | None
    relations: list[ResolvedRelation]


_TASK = msgspec.json.Decoder(TaskNow)
_RELATIONS = msgspec.json.Decoder(list[ResolvedRelation])


class Catalog:
    def __init__(self, pool: asyncpg.Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._users: OrderedDict[bytes, tuple[float, UserCaller]] = OrderedDict()

    @classmethod
    async def open(cls, dsn: Secret, *, connections: int = 4) -> Catalog:
        """Doesn't wait for the database: one that is down is found out by the first question."""
        return cls(await open_pool(dsn, connections, "tracelake-query-catalog"))

    async def close(self) -> None:
        await close_pool(self._pool, CLOSE_SECONDS)

    async def look(
        self, org_id: UUID, task_id: UUID | None, wanted: Sequence[Wanted], *, max_files: int
    ) -> Look:
        """``files`` of a relation that has more than ``max_files`` end with one too many."""
        row = await self._row(
            _SQL.look,
            task_id,
            org_id,
            [one.name for one in wanted],
            [one.version for one in wanted],
            [one.blocks.first for one in wanted],
            [one.blocks.last for one in wanted],
            max_files,
        )
        assert row is not None
        task, relations = row
        return Look(
            _TASK.decode(task) if task is not None else None,
            _RELATIONS.decode(relations) if relations is not None else [],
        )

    async def user(self, token: str) -> UserCaller | None:
        """Whose bearer token this is; None if it is nobody's."""
        if not looks_like_token(token):
            return None
        key = hash_token(token)
        now = self._clock()
        if (known := self._users.get(key)) is not None and now < known[0]:
            return known[1]
        row = await self._row(_SQL.user, key)
        if row is None:
            self._users.pop(key, None)
            return None
        found = UserCaller(row["user_id"], row["org_id"], row["name"])
        self._users[key] = (now + USER_SECONDS, found)
        self._users.move_to_end(key)
        while len(self._users) > MAX_USERS:
            self._users.popitem(last=False)
        return found

    async def names(self, org_id: UUID) -> list[str]:
        """What is published."""
        async with _asked(self._pool) as connection:
            return [row["dataset"] for row in await connection.fetch(_SQL.published, org_id, MAX_NAMES)]

    async def now(self) -> datetime:
        """The state database's time."""
        row = await self._row(_SQL.now)
        assert row is not None
        now: datetime = row["now"]
        return now

    async def check(self) -> None:
        """For readiness: raises ``Unavailable`` when the catalog can't be read now."""
        await self._row(_SQL.check)

    async def _row(self, query: str, *args: Any) -> asyncpg.Record | None:
        async with _asked(self._pool) as connection:
            return await connection.fetchrow(query, *args)


@asynccontextmanager
async def _asked(pool: asyncpg.Pool) -> AsyncIterator[PoolConnectionProxy[asyncpg.Record]]:
    """A connection whose failures are the platform's to explain; a dead one was thrown away by the pool."""
    try:
        async with pool.acquire(timeout=_ACQUIRE_SECONDS) as connection:
            yield connection
    except STATE_ERRORS as error:
        # Whoever asks isn't told of hosts, roles and databases.
        log.warning("the catalog can't be read", error=f"{type(error).__name__}: {error}")
        raise Unavailable("CatalogUnavailable", "the catalog can't be read now; try again") from error
