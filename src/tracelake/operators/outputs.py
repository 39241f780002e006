"""``Output``: one output of a task. It stages rows, and collects what the completion reports about them.

Nothing here makes anything visible. Files and rows are staged in places that only this attempt knows, and reported
when the operator returns; the completion, under the attempt's fence, points readers at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tracelake.contracts.dispatcher_api import (
    EventIn,
    InvalidateRange,
    OutputIn,
    PayloadOutput,
    PayloadWritten,
)
from tracelake.contracts.manifest import Manifest
from tracelake.contracts.operator_protocol import StagedRows, StagedTable
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.domain.table_layout import TableLayout
from tracelake.tables.data_database import DataDatabase
from tracelake.tables.scope import BLOCK_COLUMN, ReadScope

if TYPE_CHECKING:
    import pyarrow as pa

    from tracelake.tables.parquet import ParquetLayout, ParquetPlan
    from tracelake.tables.postgres_staging import Staging, StagingPlace


class Output:
    def __init__(self, payload: PayloadOutput, scope: ReadScope | None, data: DataDatabase) -> None:
        self._payload = payload
        self._scope = scope
        self._data = data
        self._staging: Staging | None = None
        self._written: list[OutputIn] = []
        self._announced: list[EventIn] = []
        self._silent = False
        self._committed = False

    @property
    def index(self) -> int:
        return self._payload.output_index

    @property
    def name(self) -> str:
        return self._payload.name

    @property
    def dataset(self) -> str | None:
        """The name that it is published under, if any."""
        return self._payload.dataset

    @property
    def dataset_uuid(self) -> UUID:
        return self._payload.dataset_uuid

    @property
    def storage(self) -> str:
        return self._payload.storage

    @property
    def revision(self) -> int:
        """Number of invalidations of the dataset when the attempt was claimed."""
        return self._payload.revision

    @property
    def written(self) -> PayloadWritten:
        """For an always-on source: how far the output reached at that time."""
        return self._payload.written or PayloadWritten()

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
        revision: int | None = None,
    ) -> EventIn:
        """An event about this output, for ``ctx.emit`` and ``ctx.commit``.

        An invalidation needs an ``event_id`` that stays the same when it is sent again. An event with a
        ``revision`` doesn't count once others have invalidated something of its scope.
        """
        return EventIn(
            dataset_uuid=self._payload.dataset_uuid,
            dataset_version=self._payload.dataset_version,
            cursor=cursor,
            start=start,
            end=end,
            revision=revision,
            finalized=finalized,
            id=event_id,
            invalidate=InvalidateRange(*invalidate) if invalidate else None,
            reason=reason,
        )

    def announce(
        self, *, cursor: int | None = None, start: int | None = None, end: int | None = None
    ) -> None:
        """Announce blocks or a cursor as done when the operator returns; by default the task's own scope."""
        self._must_be("none", "announce")
        if cursor is None and start is None and end is None and self._scope is not None:
            if (event := self.scope_event()) is not None:
                self._announced.append(event)
        elif cursor is None:
            span = self._span(start, end)
            self._announced.append(self.event(start=span.start, end=span.end))
        else:
            self._announced.append(self.event(cursor=cursor))

    def announce_nothing(self) -> None:
        """Send no event, not even that the scope is done."""
        self._must_be("none", "announce")
        self._silent = True

    def write(
        self,
        data: Any,
        start: int | None = None,
        end: int | None = None,
        *,
        sort_by: Sequence[str] = (),
        lookups: Sequence[str] = (),
        blocks_per_file: int | None = None,
        block_column: str = BLOCK_COLUMN,
        verified: str | None = None,
    ) -> Manifest:
        """Write all rows of blocks ``start``–``end`` (the task's scope if not given) as Parquet.

        ``data`` is a ``pyarrow.Table``, a pandas or a Spark ``DataFrame``; Spark's is written by the executors.
        Files are cut on a grid of ``blocks_per_file`` blocks and sorted by ``sort_by`` inside; rows without the
        block column go to one file. ``lookups`` are columns that are looked up by value, anywhere in the file.
        Without rows, an empty file is written for the columns.
        """
        from tracelake.tables.parquet import ParquetLayout, write_table

        # Only the block is certain to have a value; Arrow and Spark sort nulls differently.
        order = () if sort_by else (block_column,)
        layout = ParquetLayout(sort_by=order, lookups=tuple(lookups))
        plan = self.plan(
            start, end, blocks_per_file=blocks_per_file, block_column=block_column, layout=layout
        )
        # By its name, so that pyspark isn't imported where there is no Spark.
        if type(data).__module__.startswith("pyspark."):
            from tracelake.tables.spark_output import write_dataframe

            manifest = write_dataframe(data, plan, sort_by=tuple(sort_by), verified=verified)
        else:
            manifest = write_table(data, plan, sort_by=tuple(sort_by), verified=verified)
        self.wrote(plan, manifest)
        return manifest

    def plan(
        self,
        start: int | None = None,
        end: int | None = None,
        *,
        blocks_per_file: int | None = None,
        block_column: str = BLOCK_COLUMN,
        layout: ParquetLayout | None = None,
    ) -> ParquetPlan:
        """Where the files of blocks ``start``–``end`` go and how they are cut, for executors that write them
        themselves; ``wrote`` reports them."""
        from tracelake.tables.parquet import PLAIN, ParquetPlan

        self._must_be("parquet", "write")
        return ParquetPlan.of(
            self._staging_place(),
            self.name,
            self._new_span(start, end),
            blocks_per_file=blocks_per_file,
            block_column=block_column,
            layout=layout or PLAIN,
        )

    def wrote(self, plan: ParquetPlan, manifest: Manifest) -> None:
        """Report the files that were written by ``plan``, all of them."""
        span = self._new_span(plan.start, plan.end)
        self._written.append(self._output(span, manifest.row_count, self._payload.staging, manifest))

    def write_nothing(self, start: int | None = None, end: int | None = None) -> None:
        """Report blocks as done and without rows, where not even the columns are known."""
        if self.storage not in ("parquet", "postgres"):
            raise Invalid("InvalidOutput", f"output {self.name!r} stores nothing: use announce()")
        self._written.append(self._output(self._new_span(start, end), 0, None, None))

    def stage(
        self, data: Any, *, types: dict[str, str] | None = None, layout: TableLayout | None = None
    ) -> int:
        """Load rows of a Postgres output into its staging table; returns how many.

        ``data`` is a ``pyarrow.Table``, a pandas or a Spark ``DataFrame``; Spark's is loaded by the executors. The
        rows become visible when the operator returns, for the task's scope, or by ``ctx.commit``. ``types`` are
        Postgres types of columns that differ from the default of their Arrow type; ``layout`` is used to make the
        dataset's table, if these are its first rows.
        """
        return self._open_staging().load(data, types or {}, layout)

    def stored(self, columns: Sequence[str], start: int, end: int) -> pa.Table:
        """The rows of this Postgres output in blocks ``start``–``end`` that are committed now, in their order and
        in the types of the table: ``numeric`` comes as text. Before the first commit there are no rows, and no
        types."""
        from tracelake.tables.hot_and_cold import read_stored

        self._must_be("postgres", "stored")
        return read_stored(self._data, self._payload.dataset_version, columns, start, end)

    def stored_span(self) -> BlockRange | None:
        """From the first to the last block of this Postgres output that is committed now."""
        from tracelake.tables.hot_and_cold import stored_span

        self._must_be("postgres", "stored_span")
        return stored_span(self._data, self._payload.dataset_version)

    def open_parts(
        self, columns: pa.Schema, *, types: dict[str, str] | None = None, layout: TableLayout | None = None
    ) -> StagingPlace:
        """Where executors that make rows of several outputs at once may load the rows of this one."""
        return self._open_staging().open_parts(columns, types or {}, layout)

    def add_parts(self, parts: Sequence[StagedTable]) -> None:
        """Stage the tables that executors have loaded there."""
        self._open_staging().add_parts(parts)

    @property
    def has_staged(self) -> bool:
        """Whether anything was staged since the last commit."""
        return self._staging is not None and self._staging.pending

    def discard(self) -> None:
        """Forget the rows staged since the last commit."""
        if self._staging is not None:
            self._staging.discard()

    def finish_staging(self) -> StagedRows | None:
        """For the platform: the rows staged since the last commit."""
        self._must_be("postgres", "commit")
        return self._staging.prepare_commit(self.index) if self._staging is not None else None

    def drop_staging(self) -> None:
        """For the platform: drop the staging tables when the attempt is over."""
        if self._staging is not None:
            self._staging.drop()

    @property
    def commit_due(self) -> BlockRange | None:
        """For the platform: the blocks to commit when the operator has returned without a commit of its own. With a
        cursor that is the whole scope, even without rows: rows of an earlier fork must go."""
        if self._scope is None or self.storage != "postgres" or self._committed:
            return None
        if self._scope.by_cursor:
            return self._scope.replaced
        return self._scope.blocks if self._staging is not None and self._staging.pending else None

    def committed(self, done: OutputIn) -> None:
        """For the platform. A cursor is committed by its event; a partition by the completion that lists it."""
        if self._staging is not None:
            self._staging.committed()
        self._committed = True
        if self._scope is not None and not self._scope.by_cursor:
            self._written.append(done)

    def scope_event(self) -> EventIn | None:
        return self._scope.announced_by(self._payload) if self._scope is not None else None

    def report(self, emitted: bool) -> tuple[list[OutputIn], list[EventIn]]:
        """For the platform: files and events of the completion. ``emitted``: the operator has sent events."""
        if self.storage == "none":
            # An operator that has sent events about this output itself has announced what it wanted.
            implied = None if self._announced or emitted or self._silent else self.scope_event()
            return [], [*self._announced, *([implied] if implied else [])]
        if self._staging is not None and self._staging.pending:
            # Dropping them silently would lose rows that the operator believes to be written.
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

    def _open_staging(self) -> Staging:
        from tracelake.tables.postgres_staging import Staging

        self._must_be("postgres", "stage")
        if self._staging is None:
            # A task with a scope commits once, a source again and again.
            self._staging = Staging(self._data, self.index, reused=self._scope is None)
        return self._staging

    def _staging_place(self) -> str:
        if self._payload.staging is None:
            raise Invalid("NoStaging", f"output {self.name!r} has no place for this attempt to write to")
        return self._payload.staging

    def _span(self, start: int | None, end: int | None) -> BlockRange:
        if start is None and end is None and self._scope is not None and self._scope.blocks is not None:
            return self._scope.blocks
        if start is None or end is None:
            raise Invalid("InvalidScope", f"output {self.name!r}: give its blocks, start and end")
        try:
            return BlockRange(start, end)
        except ValueError as error:
            raise Invalid("InvalidScope", f"output {self.name!r}: {error}") from None

    def _new_span(self, start: int | None, end: int | None) -> BlockRange:
        span = self._span(start, end)
        # Two manifests about one block would be two truths.
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
