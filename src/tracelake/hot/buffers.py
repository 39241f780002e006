"""Buffered tables: rows of many producers, merged by one sink.

``merge`` is one transaction: rows are loaded by COPY into a table of the session, merged by one statement under the
version's lock and the sink's fence, and the event with the dataset's new position is recorded with them. Merging
the same batches again changes nothing and records the same event.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.buffers import POSTGRES_TYPES, BufferSchema
from tracelake.domain.dag.model import ColumnType
from tracelake.domain.errors import Invalid
from tracelake.hot.commit import REFUSED, HotStore, Refusals, Writer, meaning
from tracelake.postgres import sqlfiles

EVERYTHING = BlockRange(0, MAX_BLOCK)
"""The range of a sink's fence: a sink is its dataset's only writer."""

_SQL = sqlfiles.load("tracelake.hot", "sql/buffers.sql")
_REFUSALS = Refusals(
    stale="a newer sink has begun on this dataset",
    unfit="SchemaRefused",
    unfit_prefix="the dataset's table can't have this schema: ",
    # Values that don't fit, constraints, values too large for an index or nested too deeply. A missing table is
    # none of these: it must not turn every batch into a dead letter.
    rows_at_fault=("22", "23", "54"),
)

BufferRow = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTable:
    """A buffered dataset as the data database knows it."""

    dataset_uuid: UUID
    dataset_version: UUID
    schema: BufferSchema

    @property
    def staging_table(self) -> str:
        """One per schema, since a session's staging table keeps the columns that it was made with."""
        return f"b_{self.dataset_version.hex}_{self.schema.hash[-12:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one producer, in the order of the schema's columns, bytea as bytes. ``scope`` is the range
    of its task."""

    producer: str
    revision: int
    scope: BlockRange | None
    rows: Sequence[BufferRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraction:
    """Retracts a producer's rows about these blocks that were made below ``revision``."""

    producer: str
    revision: int
    scope: BlockRange


@dataclass(frozen=True, slots=True)
class Merged:
    """How many rows were inserted or replaced and how many retracted, the dataset's position, and the id of the
    pending event about it (None for an empty table, which has none)."""

    written: int
    retracted: int
    position: int
    outbox_id: int | None


class BufferStore(HotStore):
    """``begin`` with ``EVERYTHING`` comes first; see ``HotStore`` for that and for pending events."""

    async def ensure(self, table: BufferTable) -> None:
        """Make the table, or add new columns of its schema; ``Invalid`` for any other difference."""
        columns = [[column.name, POSTGRES_TYPES[column.type]] for column in table.schema.columns]
        async with self.connection() as connection:
            try:
                await connection.execute(
                    _SQL.ensure,
                    table.dataset_version,
                    msgspec.json.encode(columns).decode(),
                    list(table.schema.unique),
                )
            except asyncpg.PostgresError as error:
                raise meaning(error, _REFUSALS) from error

    async def merge(
        self, writer: Writer, table: BufferTable, batches: Sequence[Batch], retractions: Sequence[Retraction]
    ) -> Merged:
        """All or nothing. ``Conflict`` when a newer sink has begun, ``Invalid`` (``REFUSED``) when the
        database refuses the rows themselves, ``Unavailable`` when the same may succeed later."""
        async with self.connection() as connection:
            try:
                async with connection.transaction():
                    await self._stage(connection, table, batches)
                    row = await connection.fetchrow(
                        _SQL.merge, *_arguments(writer, table, batches, retractions)
                    )
            except asyncpg.PostgresError as error:
                raise meaning(error, _REFUSALS) from error
            # asyncpg encodes rows itself, and raises these before the server sees the value.
            except (ValueError, OverflowError, TypeError) as error:
                raise Invalid(REFUSED, f"a value can't be sent to the database: {error}") from error
            # After the commit and apart from it: inside, it would take a lock of the whole server. The rows are
            # committed, and without a signal they are found at the next look.
            with suppress(asyncpg.PostgresError):
                await connection.execute(_SQL.signal_rows, table.dataset_version)
        return Merged(row["written"], row["retracted"], row["reached"], row["outbox"])

    async def position(self, dataset_version: UUID) -> int:
        """The dataset's highest position; 0 when nothing was ever written."""
        async with self.connection() as connection:
            return int(await connection.fetchval(_SQL.position, dataset_version))

    async def _stage(self, connection: Any, table: BufferTable, batches: Sequence[Batch]) -> None:
        if not batches:
            return
        names = table.schema.names
        await connection.execute(_SQL.stage, table.dataset_version, table.staging_table, list(names))
        await connection.copy_records_to_table(
            table.staging_table,
            records=(
                (number, *row)
                # The number says which batch a row belongs to.
                for number, row in enumerate((row for batch in batches for row in batch.rows), 1)
            ),
            columns=("#", *names),
        )


def bytes_columns(schema: BufferSchema) -> list[int]:
    """The places of bytea columns in a row."""
    return [place for place, column in enumerate(schema.columns) if column.type is ColumnType.BYTEA]


def _arguments(
    writer: Writer, table: BufferTable, batches: Sequence[Batch], retractions: Sequence[Retraction]
) -> tuple[object, ...]:
    return (
        table.dataset_version,
        table.dataset_uuid,
        writer.task_id,
        writer.epoch,
        table.staging_table,
        _starts(batches),
        [batch.producer for batch in batches],
        [batch.scope and batch.scope.start for batch in batches],
        [batch.scope and batch.scope.end for batch in batches],
        [batch.revision for batch in batches],
        [each.producer for each in retractions],
        [each.scope.start for each in retractions],
        [each.scope.end for each in retractions],
        [each.revision for each in retractions],
    )


def _starts(batches: Sequence[Batch]) -> list[int]:
    """The number of each batch's first row. An empty one begins where the next does, which has the rows."""
    return list(accumulate((len(batch.rows) for batch in batches[:-1]), initial=1)) if batches else []
