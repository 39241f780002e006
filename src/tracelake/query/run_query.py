"""The one path of a query: sizes, slot, gate, names, data, engine, audit, answer. There is no other.

However it ends, an audit row says so before the caller hears of it, and a query that can't be audited has no
answer. Of the statement nothing is logged or kept but its hash; the engine's complaints quote it, so they go to the
caller alone. A caller that goes away takes its query with it: the slot is killed, not asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import structlog

from tracelake.contracts.query_api import (
    INVALID_QUERY,
    MAX_SQL_BYTES,
    PARQUET,
    QUERY_REFUSED,
    QUERY_TOO_BIG,
    QUERY_TOO_LONG,
    QueriedDataset,
    QueryRequest,
    from_wire,
)
from tracelake.domain.errors import Invalid, TooLarge, TracelakeError, Unavailable
from tracelake.objects.disk import in_thread
from tracelake.query.answers import ArrowForm, Facts, Form, JsonForm
from tracelake.query.audit import AuditEntry, AuditLog, DatasetRead, QueryOutcome
from tracelake.query.authentication import Asker
from tracelake.query.caller import Caller, TaskCaller
from tracelake.query.engine.slots import Slots
from tracelake.query.export import ParquetForm, pieces_of
from tracelake.query.export_folder import ExportFolder, Owner
from tracelake.query.metrics import QueryMetrics
from tracelake.query.open_relation import RelationOpener
from tracelake.query.settings import QueryLimits
from tracelake.serving.answer import Answer, FileAnswer

log = structlog.get_logger(__name__)

_ON_THE_WIRE = {
    "SqlSyntax": INVALID_QUERY,
    "QueryFailed": INVALID_QUERY,
    "UnknownRelation": INVALID_QUERY,
    "QueryRefused": QUERY_REFUSED,
    "QueryTooDeep": QUERY_REFUSED,
    "QueryTimeout": QUERY_TOO_LONG,
    "QueryOutOfMemory": QUERY_TOO_BIG,
}
"""What the parts say, in the words of the contract: all of them are the statement's own fault."""

_OBJECTS = frozenset({"ObjectsUnavailable", "ObjectStoreUnavailable"})


class QueryBroke(TracelakeError):
    """Something that no part of a query should do; its message may quote the statement, so it isn't kept."""

    def __init__(self) -> None:
        super().__init__("Internal", "the query ended in a way that it shouldn't; the log knows where")


@dataclass(slots=True)
class _Course:
    """How far a query has come: what the audit and the answer say of it."""

    query_id: UUID = field(default_factory=uuid4)
    began: float = field(default_factory=time.monotonic)
    datasets: Sequence[DatasetRead] = ()
    scanned: int = 0
    truncated: bool = False
    started: bool = False

    def milliseconds(self) -> int:
        return round((time.monotonic() - self.began) * 1000)

    def facts(self) -> Facts:
        named = [QueriedDataset(each.name, each.dataset_uuid, each.dataset_version) for each in self.datasets]
        return Facts(self.query_id, named, self.truncated)


class QueryRunner:
    def __init__(
        self,
        slots: Slots,
        opener: RelationOpener,
        audit: AuditLog,
        exports: ExportFolder,
        limits: QueryLimits,
        metrics: QueryMetrics,
    ) -> None:
        self._slots = slots
        self._opener = opener
        self._audit = audit
        self._exports = exports
        self._limits = limits
        self._metrics = metrics
        self._running: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def stop(self) -> None:
        """End what runs: the service is going away. Each query runs in a task of its own."""
        self._stopping = True
        for task in self._running:
            task.cancel()

    async def run(self, asker: Asker, query: QueryRequest, *, arrow: bool) -> Answer:
        """The answer, or what refuses the query in the words of the contract."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._run(asker, query, arrow=arrow)
        except Unavailable as error:
            raise _without_details(error) from None
        finally:
            self._running.discard(task)

    async def exported(self, asker: Asker, query_id: UUID) -> Answer:
        """The file that a query of this caller's was exported to. Its audit row is the query's."""
        caller = asker.caller
        if isinstance(caller, TaskCaller):
            await self._opener.check(caller)
        try:
            file = await in_thread(self._exports.open, Owner.of(caller), query_id)
        except Unavailable as error:
            raise _without_details(error) from None
        return FileAnswer(pieces_of(file), os.fstat(file.fileno()).st_size, PARQUET.encode())

    async def _run(self, asker: Asker, query: QueryRequest, *, arrow: bool) -> Answer:
        course = _Course()
        form = self._form(asker, query, course.query_id, arrow=arrow)
        try:
            try:
                await self._collect(asker, query, form, course)
            except asyncio.CancelledError:
                await self._end_canceled(asker, query, course)
                if self._stopping:
                    raise Unavailable("Stopping", "the Query Service is being stopped; ask again") from None
                raise
            except TracelakeError as error:
                refusal = on_the_wire(error)
                outcome = _outcome(refusal, started=course.started)
                await self._end(asker, query, form, course, outcome, refusal.reason)
                raise refusal from None
            except Exception as error:
                where = traceback.format_tb(error.__traceback__)[-3:]
                log.error(
                    "query broke", query_id=str(course.query_id), error=type(error).__name__, where=where
                )
                await self._end(asker, query, form, course, QueryOutcome.FAILED, "Internal")
                raise QueryBroke from None
            await self._end(asker, query, form, course, QueryOutcome.COMPLETED, None)
            return await form.publish(course.facts())
        finally:
            await asyncio.shield(form.discard())

    async def _collect(self, asker: Asker, query: QueryRequest, form: Form, course: _Course) -> None:
        limits = self._limits
        if len(query.sql.encode("utf-8", "surrogatepass")) > MAX_SQL_BYTES:
            raise TooLarge("QueryTooLarge", f"the SQL has more than {MAX_SQL_BYTES} bytes")
        from_wire(query.params)
        rows, most_bytes = self._most(query)
        if isinstance(form, ParquetForm):
            await form.admit()
        async with self._slots.take(limits.wait_seconds, key=_key(asker.caller)) as slot:
            parsed = await slot.parse(query.sql, query.params if query.params is not None else ())
            async with self._opener.open(asker.caller, parsed.relations, seconds=limits.seconds) as opened:
                course.datasets = opened.datasets
                course.started = True
                course.scanned = sum(relation.bytes() for relation in opened.relations)
                result = await slot.run(
                    opened.relations,
                    max_rows=rows,
                    max_bytes=most_bytes,
                    row_bytes=limits.result_bytes,
                    form=form.kind,
                )
                await form.begin(result.schema, result.columns)
                async for batch in result.batches:
                    await form.add(batch)
                    if form.full:
                        break
                course.truncated = result.truncated or form.full
        if query.export and course.truncated and form.rows < rows:
            raise Invalid(
                "ExportTooLarge", f"the result has more than {most_bytes} bytes; export it in parts"
            )
        await form.seal()

    def _most(self, query: QueryRequest) -> tuple[int, int]:
        """Rows and bytes. An export without a limit is of all rows."""
        limits = self._limits
        if query.export:
            return (2**31 - 1 if query.limit is None else query.limit), limits.export_bytes
        wanted = limits.default_rows if query.limit is None else query.limit
        return min(wanted, limits.max_rows), limits.result_bytes

    def _form(self, asker: Asker, query: QueryRequest, query_id: UUID, *, arrow: bool) -> Form:
        if query.export:
            return ParquetForm(self._exports, Owner.of(asker.caller), query_id, self._limits.export_bytes)
        return (ArrowForm if arrow else JsonForm)(self._limits.result_bytes)

    async def _end(
        self,
        asker: Asker,
        query: QueryRequest,
        form: Form | None,
        course: _Course,
        outcome: QueryOutcome,
        reason: str | None,
    ) -> None:
        """The audit row, written although the caller may go away meanwhile."""
        caller = asker.caller
        kind = "task" if isinstance(caller, TaskCaller) else "user"
        done = outcome is QueryOutcome.COMPLETED
        rows = form.rows if form is not None and done else 0
        milliseconds = course.milliseconds()
        entry = AuditEntry(
            caller=caller,
            sql_sha256=hashlib.sha256(query.sql.encode("utf-8", "surrogatepass")).digest(),
            outcome=outcome,
            datasets=course.datasets,
            rows=rows,
            bytes_scanned=course.scanned,
            duration_ms=milliseconds,
            reason=reason,
            exported_to=form.location if isinstance(form, ParquetForm) and done else None,
            query_id=course.query_id,
        )
        self._metrics.record(kind, outcome, milliseconds / 1000, rows, course.scanned)
        if not done:
            shown = str(course.query_id)
            log.info(
                "query", query_id=shown, caller=kind, outcome=outcome.value, reason=reason, ms=milliseconds
            )
        await asyncio.shield(self._audit.record(entry))

    async def _end_canceled(self, asker: Asker, query: QueryRequest, course: _Course) -> None:
        try:
            await self._end(asker, query, None, course, QueryOutcome.CANCELED, "Disconnected")
        except Unavailable as error:
            log.warning(
                "a canceled query has no audit row", query_id=str(course.query_id), reason=error.reason
            )


def _key(caller: Caller) -> tuple[str, UUID]:
    """Who takes turns with others."""
    return ("task", caller.task_id) if isinstance(caller, TaskCaller) else ("user", caller.user_id)


def _without_details(error: Unavailable) -> Unavailable:
    """Where the platform keeps its files is for the log."""
    if error.reason not in _OBJECTS:
        return error
    log.warning("the object store can't be used", reason=error.reason, error=error.message)
    return Unavailable(error.reason, "the object store can't be used now; try again")


def on_the_wire(error: TracelakeError) -> TracelakeError:
    """The same in the contract's words."""
    reason = _ON_THE_WIRE.get(error.reason)
    return error if reason is None else Invalid(reason, error.message)


def _outcome(refusal: TracelakeError, *, started: bool) -> QueryOutcome:
    """Refused is what was never run; what failed while it ran has read data."""
    if refusal.reason == QUERY_TOO_LONG:
        return QueryOutcome.TIMEOUT
    if not started and refusal.status < 500:
        return QueryOutcome.REFUSED
    return QueryOutcome.FAILED
