"""The audit and the metrics of queries: who read which versions, how much, and how it ended, but never the
statement.

An audit row is written before the answer: a query that can't be audited has no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from uuid import UUID, uuid4

import asyncpg
import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tracelake.domain.errors import Unavailable
from tracelake.postgres import sqlfiles
from tracelake.postgres.sessions import DATABASE_ERRORS, close_pool, open_statement_pool
from tracelake.query.caller import QueryCaller, TaskCaller, UserCaller
from tracelake.settings import Secret

_ACQUIRE_SECONDS = 5.0
_SQL = sqlfiles.load("tracelake.query", "sql/audit.sql")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


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
    """Of the statement only ``sql_sha256`` is kept; ``reason`` is the error's machine-readable reason."""

    caller: QueryCaller
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
    """Writes as a role that can only add rows."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    @classmethod
    async def open(cls, dsn: Secret, *, connections: int = 2) -> AuditLog:
        """Doesn't wait for the database: ``record`` reports that it is down."""
        return cls(await open_statement_pool(dsn, connections, "tracelake-query-audit"))

    async def close(self) -> None:
        await close_pool(self._pool)

    async def record(self, entry: AuditEntry) -> None:
        """Durable on return. Raises ``Unavailable`` (``AuditUnavailable``) when it can't be written."""
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
        except DATABASE_ERRORS as error:
            raise Unavailable(
                "AuditUnavailable", "the query can't be audited, so it isn't answered"
            ) from error

    async def check(self) -> None:
        """For readiness: raises ``Unavailable`` when rows can't be written now."""
        try:
            writable = await self._pool.fetchval(_SQL.check, timeout=_ACQUIRE_SECONDS)
        except DATABASE_ERRORS as error:
            raise Unavailable("AuditUnavailable", f"audit rows can't be written: {error}") from error
        if not writable:
            raise Unavailable("AuditUnavailable", "audit rows can't be written to this database")


class QueryMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._queries = Counter(
            "tracelake_queries",
            "Queries by kind of caller and outcome.",
            ["caller", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tracelake_query_seconds",
            "From the request to the result, waiting for a slot included.",
            ["caller"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._rows = Counter("tracelake_query_rows", "Rows in results.", ["caller"], registry=registry)
        self._bytes = Counter(
            "tracelake_query_scanned_bytes",
            "Bytes of the files and tables that queries read.",
            ["caller"],
            registry=registry,
        )

    def watch_slots(self, count: int, free: Callable[[], int]) -> None:
        registry = self._registry
        Gauge("tracelake_query_slots", "Maximum number of queries at a time.", registry=registry).set(count)
        busy = Gauge("tracelake_query_slots_busy", "Slots that aren't ready for a query.", registry=registry)
        busy.set_function(lambda: count - free())

    def record(self, caller: str, outcome: QueryOutcome, seconds: float, rows: int, scanned: int) -> None:
        self._queries.labels(caller, outcome.value).inc()
        self._seconds.labels(caller).observe(seconds)
        self._rows.labels(caller).inc(rows)
        self._bytes.labels(caller).inc(scanned)
