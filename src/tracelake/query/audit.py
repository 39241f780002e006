"""The audit of queries: who read which versions, how much of it, and how it ended. Never what was asked.

A row is written before anything is answered: a query that can't be audited has no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from uuid import UUID, uuid4

import asyncpg
import msgspec

from tracelake import sqlfiles
from tracelake.domain.errors import Unavailable
from tracelake.pool_end import close_pool
from tracelake.query.caller import Caller, TaskCaller, UserCaller
from tracelake.query.state_pool import CLOSE_SECONDS, STATE_ERRORS, open_pool
from tracelake.secret import Secret

_ACQUIRE_SECONDS = 5.0

_SQL = sqlfiles.load("tracelake.query", "sql/audit.sql")


class QueryOutcome(StrEnum):
    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELED = "canceled"


class DatasetRead(msgspec.Struct, frozen=True):
    """A dataset version that a query read, under the name that the query used."""

    name: str
    dataset_uuid: UUID
    dataset_version: UUID
    revision: int


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """``sql_sha256`` is all that is kept of the statement; ``reason`` is the machine word of a refusal."""

    caller: Caller
    sql_sha256: bytes
    outcome: QueryOutcome
    datasets: Sequence[DatasetRead] = ()
    rows: int = 0
    bytes_scanned: int = 0
    duration_ms: int = 0
    reason: str | None = None
    exported_to: str | None = None
    query_id: UUID = msgspec.field(default_factory=uuid4)


class AuditLog:
    """Writes by a role that can add rows and do nothing else."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    @classmethod
    async def open(cls, dsn: Secret, *, connections: int = 2) -> AuditLog:
        """Doesn't wait for the database: one that is down is found out by ``record``."""
        return cls(await open_pool(dsn, connections, "tracelake-query-audit"))

    async def close(self) -> None:
        await close_pool(self._pool, CLOSE_SECONDS)

    async def record(self, entry: AuditEntry) -> None:
        """Durable on return; ``Unavailable`` (``AuditUnavailable``) when it can't be written."""
        caller = entry.caller
        user = caller if isinstance(caller, UserCaller) else None
        task = caller if isinstance(caller, TaskCaller) else None
        try:
            await self._pool.execute(
                _SQL.record,
                entry.query_id,
                caller.org_id,
                "user" if user is not None else "task",
                user.user_id if user is not None else None,
                task.task_id if task is not None else None,
                task.attempt if task is not None else None,
                msgspec.json.encode(entry.datasets).decode(),
                entry.sql_sha256,
                entry.outcome.value,
                entry.reason,
                entry.rows,
                entry.bytes_scanned,
                entry.duration_ms,
                entry.exported_to,
                timeout=_ACQUIRE_SECONDS,
            )
        except STATE_ERRORS as error:
            raise Unavailable(
                "AuditUnavailable", "the query can't be audited, so it isn't answered"
            ) from error

    async def check(self) -> None:
        """For readiness: raises ``Unavailable`` when rows can't be written now."""
        try:
            writable = await self._pool.fetchval(_SQL.check, timeout=_ACQUIRE_SECONDS)
        except STATE_ERRORS as error:
            raise Unavailable("AuditUnavailable", f"audit rows can't be written: {error}") from error
        if not writable:
            raise Unavailable("AuditUnavailable", "audit rows can't be written to this database")
