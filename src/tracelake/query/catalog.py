"""The Query Service's view of the state database: names of a query become dataset versions and committed files.

The service reads views that show committed data and nothing else. One statement gives everything that a query
needs, so it is of one moment and costs one round trip. Only the owner of a bearer token is cached, for
``USER_SECONDS``: a revoked token works that much longer.

``resolve`` finds the datasets that the caller may read; for the caller no others exist. A task reads the datasets
of its token in the token's versions, even if they are no longer current, under their names and as ``input_0``,
``input_1`` and so on. A user reads published datasets in their current versions. Names are resolved once: the whole
query reads the version that was found.
"""

from __future__ import annotations

import difflib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, assert_never
from uuid import UUID

import asyncpg
import msgspec
import structlog
from asyncpg.pool import PoolConnectionProxy

from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import Storage
from tracelake.domain.errors import Conflict, NotFound, Unavailable
from tracelake.domain.task import Outcome, TaskStatus, check_lives
from tracelake.postgres import sqlfiles
from tracelake.postgres.sessions import DATABASE_ERRORS, close_pool, open_statement_pool
from tracelake.query.caller import QueryCaller, TaskCaller, UserCaller
from tracelake.settings import Secret
from tracelake.tables.hot_and_cold import blocks_without_files
from tracelake.tables.scope import ReadScope
from tracelake.tokens.opaque_tokens import hash_user_token, looks_like_user_token

USER_SECONDS = 5.0
MAX_USERS = 1024
MAX_NAMES = 1000
_ACQUIRE_SECONDS = 10.0
_SQL = sqlfiles.load("tracelake.query", "sql/catalog.sql")
_SHOWN_NAMES = 20

log = structlog.get_logger(__name__)


class WantedBlocks(msgspec.Struct, frozen=True):
    """The blocks that a query can need of a relation, by its predicate; none if ``first`` is above ``last``."""

    first: int = 0
    last: int = MAX_BLOCK

    @property
    def bounded(self) -> bool:
        return (self.first, self.last) != (0, MAX_BLOCK)


class ColdFile(msgspec.Struct, frozen=True, array_like=True):
    """A committed file; the blocks are None if its rows have no block numbers."""

    location: str
    bytes: int
    min_block: int | None = None
    max_block: int | None = None


class ResolvedRelation(msgspec.Struct, frozen=True, kw_only=True):
    """The dataset version behind a name of the query, and where its committed rows are.

    ``files`` are those that may hold wanted rows; ``sample`` is any file of the version, for its columns. ``cold``
    are the committed ranges among the wanted blocks; the rows of ``hot_version`` cover all other blocks."""

    name: str
    dataset: str | None
    dataset_uuid: UUID
    dataset_version: UUID
    revision: int
    storage: Storage
    output_name: str
    operator: str | None
    buffer_schema: BufferSchema | None
    hot_version: UUID | None
    sample: ColdFile | None
    cold: tuple[BlockRange, ...] | None
    files: tuple[ColdFile, ...] | None

    @property
    def rows_version(self) -> UUID | None:
        """The version whose hot table is read, if any."""
        return self.dataset_version if self.storage is Storage.POSTGRES else self.hot_version

    def hot_spans(self, wanted: WantedBlocks) -> list[BlockRange]:
        """The wanted blocks that only the hot table can have; all of them for a dataset that is only hot."""
        return blocks_without_files(ReadScope(wanted.first, wanted.last), self.cold or ())

    def needs_hot(self, wanted: WantedBlocks) -> bool:
        """Whether the hot table is needed for rows, or for columns because no file has them."""
        return self.rows_version is not None and (self.sample is None or bool(self.hot_spans(wanted)))


class CatalogTask(msgspec.Struct, frozen=True):
    """A task's last attempt, and its outcome if it has ended."""

    task_id: UUID
    attempt: int
    status: TaskStatus
    last_outcome: Outcome | None


class WantedRelation(msgspec.Struct, frozen=True):
    """A relation to look for: by its published name, or the version that a token pins it to."""

    name: str
    version: UUID | None
    blocks: WantedBlocks


class CatalogAnswer(msgspec.Struct, frozen=True):
    """The catalog's contents at one moment; ``relations`` has only those that exist."""

    task: CatalogTask | None
    relations: list[ResolvedRelation]


_TASK = msgspec.json.Decoder(CatalogTask)
_RELATIONS = msgspec.json.Decoder(list[ResolvedRelation])


class Catalog:
    def __init__(self, pool: asyncpg.Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._users: OrderedDict[bytes, tuple[float, UserCaller]] = OrderedDict()

    @classmethod
    async def open(cls, dsn: Secret, *, connections: int = 4) -> Catalog:
        """Doesn't wait for the database: the first read reports that it is down."""
        return cls(await open_statement_pool(dsn, connections, "tracelake-query-catalog"))

    async def close(self) -> None:
        await close_pool(self._pool)

    async def look(
        self, org_id: UUID, task_id: UUID | None, wanted: Sequence[WantedRelation], *, max_files: int
    ) -> CatalogAnswer:
        """A relation with more than ``max_files`` has one more in ``files``, so that the caller can see it."""
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
        return CatalogAnswer(
            _TASK.decode(task) if task is not None else None,
            _RELATIONS.decode(relations) if relations is not None else [],
        )

    async def user(self, token: str) -> UserCaller | None:
        """The owner of a bearer token; None if it isn't valid."""
        if not looks_like_user_token(token):
            return None
        key = hash_user_token(token)
        now = self._clock()
        if (known := self._users.get(key)) is not None and now < known[0]:
            return known[1]
        row = await self._row(_SQL.user, key)
        if row is None:
            # Unknown tokens aren't kept: anyone can send any number of them.
            self._users.pop(key, None)
            return None
        found = UserCaller(row["user_id"], row["org_id"], row["name"])
        self._users[key] = (now + USER_SECONDS, found)
        self._users.move_to_end(key)
        while len(self._users) > MAX_USERS:
            self._users.popitem(last=False)
        return found

    async def names(self, org_id: UUID) -> list[str]:
        """The names of published datasets."""
        async with _acquired(self._pool) as connection:
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
        async with _acquired(self._pool) as connection:
            return await connection.fetchrow(query, *args)


@asynccontextmanager
async def _acquired(pool: asyncpg.Pool) -> AsyncIterator[PoolConnectionProxy[asyncpg.Record]]:
    """A connection whose failures become ``Unavailable``; the pool discards a dead one."""
    try:
        async with pool.acquire(timeout=_ACQUIRE_SECONDS) as connection:
            yield connection
    except DATABASE_ERRORS as error:
        # The caller must not learn of hosts, roles and databases; they go to the log.
        log.warning("the catalog can't be read", error=f"{type(error).__name__}: {error}")
        raise Unavailable("CatalogUnavailable", "the catalog can't be read now; try again") from error


async def resolve(
    catalog: Catalog, caller: QueryCaller, wanted: Mapping[str, WantedBlocks], *, max_files: int
) -> dict[str, ResolvedRelation]:
    """The relations by the names in the query, which are in lower case as all names of datasets are. An attempt
    that is over is refused even if it names no relation."""
    known: Sequence[str]
    match caller:
        case TaskCaller():
            own = names_of_task(caller)
            asked = [
                WantedRelation(name, own[name], blocks) for name, blocks in wanted.items() if name in own
            ]
            look = await catalog.look(caller.org_id, caller.task_id, asked, max_files=max_files)
            check_attempt(look.task, caller)
            known = list(own)
        case UserCaller():
            asked = [WantedRelation(name, None, blocks) for name, blocks in wanted.items()]
            look = await catalog.look(caller.org_id, None, asked, max_files=max_files)
            # Names are needed only for the message about a missing one, so they cost a round trip only then.
            known = [] if len(look.relations) == len(wanted) else await catalog.names(caller.org_id)
        case _:
            assert_never(caller)
    found = {relation.name: relation for relation in look.relations}
    if missing := [name for name in wanted if name not in found]:
        raise _unknown(missing, known)
    return {name: found[name] for name in wanted}


def names_of_task(caller: TaskCaller) -> dict[str, UUID]:
    """The names that an attempt can use, and their versions. If a dataset has the name of another one's place
    (``input_1``), the name is ambiguous and left out: another user may have chosen it."""
    places = {f"input_{place}": dataset.dataset_version for place, dataset in enumerate(caller.datasets)}
    named = {
        dataset.name: dataset.dataset_version
        # Reversed, so that the first dataset of a name wins.
        for dataset in reversed(caller.datasets)
        if dataset.name is not None
    }
    doubtful = {name for name in places if named.get(name, places[name]) != places[name]}
    return {name: version for name, version in {**places, **named}.items() if name not in doubtful}


def check_attempt(task: CatalogTask | None, caller: TaskCaller) -> None:
    """The same rule as for every other call of an attempt: it must be the current one, and not have ended."""
    if task is None:
        raise Conflict("StaleAttempt", "the token's task doesn't exist")
    if task.attempt != caller.attempt:
        raise Conflict("StaleAttempt", f"attempt {caller.attempt} is not the current one ({task.attempt})")
    check_lives(task.attempt, task.status, task.last_outcome)


def _unknown(missing: Sequence[str], known: Sequence[str]) -> NotFound:
    likely = difflib.get_close_matches(missing[0], known, _SHOWN_NAMES, 0.4)
    shown = [*likely, *[name for name in known if name not in likely]][:_SHOWN_NAMES]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    there = f"there are {', '.join(shown)}{more}" if shown else "there are none that you can read"
    return NotFound("UnknownRelation", f"no dataset {', '.join(repr(name) for name in missing)}: {there}")
