"""An output of a task: where what an operator has made goes, and what is said about it.

Nothing here makes anything visible. Files and rows are staged in places that only this attempt knows, and
reported when the operator returns; the completion, under the attempt's fence, points readers at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tracelake.contracts.dispatcher_api import EventIn, InvalidateRange, OutputIn, PayloadOutput
from tracelake.contracts.manifest import Manifest
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.operators.scope import Scope

if TYPE_CHECKING:
    from tracelake.operators.postgres_output import Staging

BLOCK_COLUMN = "block_number"


class Output:
    def __init__(self, payload: PayloadOutput, scope: Scope | None, staging_dsn: str | None) -> None:
        self._payload = payload
        self._scope = scope
        self._staging_dsn = staging_dsn
        self._staging: Staging | None = None
        self._written: list[OutputIn] = []
        self._announced: list[EventIn] = []
        self._committed = False

    @property
    def index(self) -> int:
        return self._payload.output_index

    @property
    def name(self) -> str:
        return self._payload.name

    @property
    def dataset(self) -> str | None:
        """The name that it is published under, if it is."""
        return self._payload.dataset

    @property
    def dataset_uuid(self) -> UUID:
        return self._payload.dataset_uuid

    @property
    def storage(self) -> str:
        return self._payload.storage

    def event(
        self,
        *,
        cursor: int | None = None,
        start: int | None = None,
        end: int | None = None,
        finalized: int | None = None,
        invalidate: tuple[int, int] | None = None,
        event_id: str | None = None,
        reason: str | None = None,
    ) -> EventIn:
        """An event about this output, for ``ctx.emit`` and ``ctx.commit``.

        An invalidation needs an ``event_id`` that is the same whenever it is sent again.
        """
        return EventIn(
            dataset_uuid=self._payload.dataset_uuid,
            dataset_version=self._payload.dataset_version,
            cursor=cursor,
            start=start,
            end=end,
            finalized=finalized,
            id=event_id,
            invalidate=InvalidateRange(*invalidate) if invalidate else None,
            reason=reason,
        )

    def announce(
        self, *, cursor: int | None = None, start: int | None = None, end: int | None = None
    ) -> None:
        """Say, when the operator returns, that this much is done; without it the task's own scope is meant."""
        self._must_be("none", "announce")
        if cursor is None and start is None and end is None and self._scope is not None:
            if (event := self.scope_event()) is not None:
                self._announced.append(event)
        elif cursor is None:
            span = self._span(start, end)
            self._announced.append(self.event(start=span.start, end=span.end))
        else:
            self._announced.append(self.event(cursor=cursor))

    def write(
        self,
        data: Any,
        start: int | None = None,
        end: int | None = None,
        *,
        sort_by: Sequence[str] = (),
        blocks_per_file: int | None = None,
        block_column: str = BLOCK_COLUMN,
        verified: str | None = None,
    ) -> Manifest:
        """Write all rows of blocks ``start``–``end`` (the task's scope if not given) as Parquet.

        ``data`` is a ``pyarrow.Table``, a pandas or a Spark ``DataFrame``; Spark's is written by the executors.
        Files are cut on a grid of ``blocks_per_file`` blocks and sorted by ``sort_by`` inside; rows without the
        block column go to one file. No rows at all is fine: an empty file says what the columns are.
        """
        from tracelake.operators.parquet_output import ParquetPlan, write_parquet

        self._must_be("parquet", "write")
        span = self._new_span(start, end)
        plan = ParquetPlan.of(
            self._staging_place(), self.name, span, blocks_per_file=blocks_per_file, block_column=block_column
        )
        manifest = write_parquet(data, plan, sort_by=tuple(sort_by), verified=verified)
        self._written.append(self._output(span, manifest.row_count, self._payload.staging, manifest))
        return manifest

    def write_nothing(self, start: int | None = None, end: int | None = None) -> None:
        """Report blocks as done and without rows, where not even the columns are known."""
        if self.storage not in ("parquet", "postgres"):
            raise Invalid("InvalidOutput", f"output {self.name!r} stores nothing: use announce()")
        self._written.append(self._output(self._new_span(start, end), 0, None, None))

    def stage(self, data: Any, *, types: dict[str, str] | None = None) -> int:
        """Load rows of a Postgres output into its staging table; returns how many.

        They become visible when the operator returns, for the task's scope, or by ``ctx.commit``. ``types`` says
        what columns are to be where it isn't what their Arrow type suggests.
        """
        from tracelake.operators.postgres_output import Staging

        self._must_be("postgres", "stage")
        if self._staging_dsn is None:
            raise Invalid("NoDataDatabase", f"output {self.name!r}: this worker has no data database")
        if self._staging is None:
            self._staging = Staging(self._staging_dsn, self._staging_place())
        self._committed = False
        return self._staging.load(data, types or {})

    def finish_staging(self) -> None:
        """For the platform: all rows are in the staging table, and nobody holds it any more."""
        self._must_be("postgres", "commit")
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    @property
    def commit_due(self) -> BlockRange | None:
        """For the platform: what is to be committed when the operator has returned without doing so itself."""
        blocks = self._scope.blocks if self._scope is not None else None
        return blocks if self._staging is not None and not self._committed else None

    def committed(self, done: OutputIn) -> None:
        """For the platform. A cursor is committed by its event; a partition by the completion that lists it."""
        self._committed = True
        if self._scope is not None and not self._scope.by_cursor:
            self._written.append(done)

    def scope_event(self) -> EventIn | None:
        return self._scope.announced_by(self._payload) if self._scope is not None else None

    def report(self, emitted: bool) -> tuple[list[OutputIn], list[EventIn]]:
        """For the platform: what a completion lists. ``emitted`` if the operator has sent events of its own."""
        if self.storage == "none":
            implied = None if self._announced or emitted else self.scope_event()
            return [], [*self._announced, *([implied] if implied else [])]
        if self._staging is not None:
            raise Invalid("NotCommitted", f"rows of output {self.name!r} were staged but not committed")
        if not self._written and self._scope is not None and not self._scope.by_cursor:
            verb = "write()" if self.storage == "parquet" else "stage()"
            raise Invalid(
                "OutputMissing",
                f"output {self.name!r} was not written: call its {verb}, without rows as well",
            )
        return self._written, []

    def _must_be(self, storage: str, verb: str) -> None:
        if self.storage != storage:
            raise Invalid(
                "InvalidOutput", f"output {self.name!r} has storage {self.storage}: no {verb}() there"
            )

    def _staging_place(self) -> str:
        if self._payload.staging is None:
            raise Invalid("NoStaging", f"output {self.name!r} has no place for this attempt to write to")
        return self._payload.staging

    def _span(self, start: int | None, end: int | None) -> BlockRange:
        if start is None and end is None and self._scope is not None and self._scope.blocks is not None:
            return self._scope.blocks
        if start is None or end is None:
            raise Invalid("InvalidScope", f"output {self.name!r}: say which blocks these are, start and end")
        try:
            return BlockRange(start, end)
        except ValueError as error:
            raise Invalid("InvalidScope", f"output {self.name!r}: {error}") from None

    def _new_span(self, start: int | None, end: int | None) -> BlockRange:
        span = self._span(start, end)
        for earlier in self._written:
            assert earlier.start is not None
            assert earlier.end is not None
            if span.overlaps(BlockRange(earlier.start, earlier.end)):
                raise Invalid(
                    "OutputTwice",
                    f"output {self.name!r} has already been written for {earlier.start}-{earlier.end}",
                )
        return span

    def _output(
        self, span: BlockRange, rows: int, location: str | None, manifest: Manifest | None
    ) -> OutputIn:
        return OutputIn(
            output_index=self.index,
            dataset_uuid=self._payload.dataset_uuid,
            dataset_version=self._payload.dataset_version,
            location=location,
            row_count=rows,
            start=span.start,
            end=span.end,
            manifest=manifest,
        )
