"""Buffered tables: rows of many producers, merged by one sink.

``merge`` is one transaction: rows are loaded by COPY into a table of the session, merged by one statement under the
version's lock and the sink's fence, and the event that says how far the dataset has come is kept with them. Merging
the same again changes nothing, and says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from tracelake import sqlfiles
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.buffer_schema import POSTGRES_TYPES, BufferSchema
from tracelake.domain.dag.model import ColumnType
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.hot.commit import HotStore, Writer

EVERYTHING = BlockRange(0, MAX_BLOCK)
"""What a sink's fence is for: it is its dataset's only writer."""
REFUSED = "RowsRefused"

_SQL = sqlfiles.load("tracelake.hot", "sql/buffers.sql")
_STALE = "TL001"
_UNFIT = "TL002"
_ROWS_AT_FAULT = ("22", "23", "54")
"""Classes of errors that are about the rows: values that don't fit, constraints, what is too large for an index
or too deep. All others are the database's state, and may pass."""

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTable:
    """A buffered dataset as the data database knows it."""

    dataset_uuid: UUID
    dataset_version: UUID
    schema: BufferSchema

    @property
    def staging_table(self) -> str:
        """Another one for every schema, since what a session has staged into once has its columns for good."""
        return f"b_{self.dataset_version.hex}_{self.schema.hash[-12:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one producer, in the order of the schema's columns, bytea as bytes. ``scope`` is what its task was
    about."""

    producer: str
    revision: int
    scope: BlockRange | None
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraction:
    """Of a producer's rows about these blocks, those below ``revision`` no longer hold."""

    producer: str
    revision: int
    scope: BlockRange


@dataclass(frozen=True, slots=True)
class Merged:
    """How many rows were inserted or replaced and how many retracted, how far the dataset has come, and under which
    number that is still to be said (None when there is nothing to say: the table is empty)."""

    written: int
    retracted: int
    position: int
    outbox_id: int | None


class BufferStore(HotStore):
    """``begin`` with ``EVERYTHING`` comes first; see ``HotStore`` for that, and for ``unsaid`` and ``said``."""

    async def ensure(self, table: BufferTable) -> None:
        """Make the table, or add what its schema has gained; ``Invalid`` for any other difference."""
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
                raise _meaning(error) from error

    async def merge(
        self, writer: Writer, table: BufferTable, batches: Sequence[Batch], retractions: Sequence[Retraction]
    ) -> Merged:
        """All or nothing. ``Conflict`` when a newer sink has begun, ``Invalid`` (``REFUSED``) when it is the
        rows that the database doesn't take, ``Unavailable`` when the same may succeed later."""
        async with self.connection() as connection:
            try:
                async with connection.transaction():
                    await self._stage(connection, table, batches)
                    row = await connection.fetchrow(
                        _SQL.merge, *_arguments(writer, table, batches, retractions)
                    )
            except asyncpg.PostgresError as error:
                raise _meaning(error) from error
            except (ValueError, OverflowError, TypeError) as error:
                raise Invalid(REFUSED, f"a value can't be sent to the database: {error}") from error
        return Merged(row["written"], row["retracted"], row["reached"], row["outbox"])

    async def position(self, dataset_version: UUID) -> int:
        """How far the dataset has come; 0 when nothing was ever written."""
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
                for number, row in enumerate((row for batch in batches for row in batch.rows), 1)
            ),
            columns=("#", *names),
        )


def bytes_columns(schema: BufferSchema) -> list[int]:
    """Where a row has bytes."""
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


def _meaning(error: asyncpg.PostgresError) -> Conflict | Invalid | Unavailable:
    """Only what is the rows' own fault may be held against them: a table that is gone must not bury every batch."""
    code = str(error.sqlstate or "")
    if code == _STALE:
        return Conflict("StaleEpoch", "a newer sink has begun on this dataset")
    if code == _UNFIT:
        return Invalid("SchemaRefused", f"the dataset's table can't have this schema: {error}")
    if code[:2] in _ROWS_AT_FAULT:
        return Invalid(REFUSED, f"the data database refuses the rows: {error}")
    return Unavailable("DataUnavailable", f"the data database failed: {error}")
