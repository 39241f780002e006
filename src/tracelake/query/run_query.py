"""The one path of every query: sizes, slot, gate, names, data, engine, audit, answer.

However a query ends, its audit row is written before the caller is answered; a query that can't be audited has no
answer. Of the statement only its hash is logged or kept; the engine's errors quote it, so they go to the caller
alone. When the caller disconnects, its query's slot is killed.
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
from tracelake.objects.directory import in_thread
from tracelake.query.answers import ArrowResultWriter, JsonResultWriter, ResultMetadata, ResultWriter
from tracelake.query.audit import AuditEntry, AuditLog, DatasetRead, QueryMetrics, QueryOutcome
from tracelake.query.caller import AuthenticatedCaller, QueryCaller, TaskCaller
from tracelake.query.engine.column_types import HUGEINT_TOO_WIDE
from tracelake.query.engine.slots import Slots
from tracelake.query.export import ExportFolder, ExportOwner, ParquetResultWriter, pieces_of
from tracelake.query.open_relation import RelationOpener
from tracelake.query.settings import QueryLimits
from tracelake.serving.response import FileResponse, Response

#: Internal reasons and those of the contract: all of them are the statement's own fault.
_ON_THE_WIRE = {
    "SqlSyntax": INVALID_QUERY,
    "QueryFailed": INVALID_QUERY,
    HUGEINT_TOO_WIDE: INVALID_QUERY,
    "UnknownRelation": INVALID_QUERY,
    "QueryRefused": QUERY_REFUSED,
    "QueryTooDeep": QUERY_REFUSED,
    "QueryTimeout": QUERY_TOO_LONG,
    "QueryOutOfMemory": QUERY_TOO_BIG,
}
_OBJECTS = frozenset({"ObjectsUnavailable", "ObjectStoreUnavailable"})

log = structlog.get_logger(__name__)


class QueryBroken(TracelakeError):
    """An unexpected error. Its message may quote the statement, so it is neither kept nor answered."""

    def __init__(self) -> None:
        super().__init__("Internal", "the query failed with an internal error; the log says where")


@dataclass(slots=True)
class _RunState:
    """How far a query has come, for its audit row and its answer."""

    query_id: UUID = field(default_factory=uuid4)
    began: float = field(default_factory=time.monotonic)
    datasets: Sequence[DatasetRead] = ()
    scanned: int = 0
    truncated: bool = False
    started: bool = False

    def milliseconds(self) -> int:
        return round((time.monotonic() - self.began) * 1000)

    def facts(self) -> ResultMetadata:
        named = [QueriedDataset(each.name, each.dataset_uuid, each.dataset_version) for each in self.datasets]
        return ResultMetadata(self.query_id, named, self.truncated)


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
        """Cancel all running queries: the service is shutting down. Each query runs in its own task."""
        self._stopping = True
        for task in self._running:
            task.cancel()

    async def run(self, asker: AuthenticatedCaller, query: QueryRequest, *, arrow: bool) -> Response:
        """The answer. Errors have the contract's reasons."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._run(asker, query, arrow=arrow)
        except Unavailable as error:
            raise _without_details(error) from None
        finally:
            self._running.discard(task)

    async def exported(self, asker: AuthenticatedCaller, query_id: UUID) -> Response:
        """The file that one of the caller's queries was exported to. The query's audit row covers the download."""
        caller = asker.caller
        if isinstance(caller, TaskCaller):
            await self._opener.check(caller)
        try:
            file = await in_thread(self._exports.open, ExportOwner.of(caller), query_id)
        except Unavailable as error:
            raise _without_details(error) from None
        return FileResponse(pieces_of(file), os.fstat(file.fileno()).st_size, PARQUET.encode())

    async def _run(self, asker: AuthenticatedCaller, query: QueryRequest, *, arrow: bool) -> Response:
        state = _RunState()
        form = self._form(asker, query, state.query_id, arrow=arrow)
        try:
            try:
                try:
                    await self._collect(asker, query, form, state)
                except Invalid as error:
                    if error.reason != HUGEINT_TOO_WIDE:
                        raise
                    # Only a row shows that a type is too narrow, and the rows before it are in that type.
                    await form.discard()
                    form = self._form(asker, query, state.query_id, arrow=arrow)
                    await self._collect(asker, query, form, state, hugeint_as_text=True)
            except asyncio.CancelledError:
                await self._end_canceled(asker, query, state)
                # Our own cancellation: the caller is still connected and gets an answer.
                if self._stopping:
                    raise Unavailable("Stopping", "the Query Service is shutting down; try again") from None
                raise
            except TracelakeError as error:
                refusal = on_the_wire(error)
                outcome = _outcome(refusal, started=state.started)
                await self._end(asker, query, form, state, outcome, refusal.reason)
                raise refusal from None
            except Exception as error:
                # Only the places in the code: the error's own text may quote the statement.
                where = traceback.format_tb(error.__traceback__)[-3:]
                log.error(
                    "query broke", query_id=str(state.query_id), error=type(error).__name__, where=where
                )
                await self._end(asker, query, form, state, QueryOutcome.FAILED, "Internal")
                raise QueryBroken from None
            await self._end(asker, query, form, state, QueryOutcome.COMPLETED, None)
            return await form.publish(state.facts())
        finally:
            # Shielded, so that a canceled request leaves no file behind.
            await asyncio.shield(form.discard())

    async def _collect(
        self,
        asker: AuthenticatedCaller,
        query: QueryRequest,
        form: ResultWriter,
        state: _RunState,
        *,
        hugeint_as_text: bool = False,
    ) -> None:
        limits = self._limits
        if len(query.sql.encode("utf-8", "surrogatepass")) > MAX_SQL_BYTES:
            raise TooLarge("QueryTooLarge", f"the SQL has more than {MAX_SQL_BYTES} bytes")
        # Refuse bad parameters before a slot is taken for them.
        from_wire(query.params)
        rows, most_bytes = self._most(query)
        if isinstance(form, ParquetResultWriter):
            await form.admit()
        async with self._slots.take(limits.wait_seconds, key=_key(asker.caller)) as slot:
            parsed = await slot.parse(query.sql, query.params if query.params is not None else ())
            async with self._opener.open(asker.caller, parsed.relations, seconds=limits.seconds) as opened:
                state.datasets = opened.datasets
                state.started = True
                state.scanned = sum(relation.bytes() for relation in opened.relations)
                result = await slot.run(
                    opened.relations,
                    max_rows=rows,
                    max_bytes=most_bytes,
                    row_bytes=limits.result_bytes,
                    form=form.kind,
                    hugeint_as_text=hugeint_as_text,
                )
                await form.begin(result.schema, result.columns)
                async for batch in result.batches:
                    await form.add(batch)
                    if form.full:
                        break
                state.truncated = result.truncated or form.full
        # The caller's own limit may cut an export; the limit of bytes must not do so unnoticed.
        if query.export and state.truncated and form.rows < rows:
            raise Invalid(
                "ExportTooLarge", f"the result has more than {most_bytes} bytes; export it in parts"
            )
        await form.seal()

    def _most(self, query: QueryRequest) -> tuple[int, int]:
        """Maximum number of rows and bytes. An export without a limit has all rows."""
        limits = self._limits
        if query.export:
            return (2**31 - 1 if query.limit is None else query.limit), limits.export_bytes
        wanted = limits.default_rows if query.limit is None else query.limit
        return min(wanted, limits.max_rows), limits.result_bytes

    def _form(
        self, asker: AuthenticatedCaller, query: QueryRequest, query_id: UUID, *, arrow: bool
    ) -> ResultWriter:
        if query.export:
            return ParquetResultWriter(
                self._exports, ExportOwner.of(asker.caller), query_id, self._limits.export_bytes
            )
        return (ArrowResultWriter if arrow else JsonResultWriter)(self._limits.result_bytes)

    async def _end(
        self,
        asker: AuthenticatedCaller,
        query: QueryRequest,
        form: ResultWriter | None,
        state: _RunState,
        outcome: QueryOutcome,
        reason: str | None,
    ) -> None:
        """Record the end in audit, metrics and log. The audit row is written even if the caller disconnects."""
        caller = asker.caller
        kind = "task" if isinstance(caller, TaskCaller) else "user"
        done = outcome is QueryOutcome.COMPLETED
        rows = form.rows if form is not None and done else 0
        milliseconds = state.milliseconds()
        entry = AuditEntry(
            caller=caller,
            sql_sha256=hashlib.sha256(query.sql.encode("utf-8", "surrogatepass")).digest(),
            outcome=outcome,
            datasets=state.datasets,
            rows=rows,
            bytes_scanned=state.scanned,
            duration_ms=milliseconds,
            reason=reason,
            exported_to=form.location if isinstance(form, ParquetResultWriter) and done else None,
            query_id=state.query_id,
        )
        self._metrics.record(kind, outcome, milliseconds / 1000, rows, state.scanned)
        if not done:
            shown = str(state.query_id)
            log.info(
                "query", query_id=shown, caller=kind, outcome=outcome.value, reason=reason, ms=milliseconds
            )
        # The query may have read data, so a caller can't avoid the audit by disconnecting.
        await asyncio.shield(self._audit.record(entry))

    async def _end_canceled(self, asker: AuthenticatedCaller, query: QueryRequest, state: _RunState) -> None:
        try:
            await self._end(asker, query, None, state, QueryOutcome.CANCELED, "Disconnected")
        except Unavailable as error:
            # The caller is gone, so there is no answer that could be withheld.
            log.warning(
                "a canceled query has no audit row", query_id=str(state.query_id), reason=error.reason
            )


def _key(caller: QueryCaller) -> tuple[str, UUID]:
    """Identifies the caller among those that take turns."""
    return ("task", caller.task_id) if isinstance(caller, TaskCaller) else ("user", caller.user_id)


def _without_details(error: Unavailable) -> Unavailable:
    """Keeps locations of the platform's files in the log and out of the answer."""
    if error.reason not in _OBJECTS:
        return error
    log.warning("the object store can't be used", reason=error.reason, error=error.message)
    return Unavailable(error.reason, "the object store can't be used now; try again")


def on_the_wire(error: TracelakeError) -> TracelakeError:
    """The same error with the contract's reason."""
    reason = _ON_THE_WIRE.get(error.reason)
    return error if reason is None else Invalid(reason, error.message)


def _outcome(refusal: TracelakeError, *, started: bool) -> QueryOutcome:
    """A query is refused if it never ran; one that failed while it ran has read data."""
    if refusal.reason == QUERY_TOO_LONG:
        return QueryOutcome.TIMEOUT
    if not started and refusal.status < 500:
        return QueryOutcome.REFUSED
    return QueryOutcome.FAILED
