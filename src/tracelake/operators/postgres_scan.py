"""A reading of one hot table in one snapshot, planned here and done anywhere: by this process or by executors.

A scan is small and travels to executors by pickle. Its rows come in the shape that the dataset has as Parquet:
a table with the columns of a chain table is turned into that one's, so that whoever reads a dataset needn't know
whether it is hot or cold. Of other tables, columns come in the types that ``postgres_types`` has for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from uuid import UUID

import msgspec
import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.where import Predicate
from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES
from tracelake.operators.arrow_input import where_expression
from tracelake.operators.data_database import SQL, DataDatabase, connect
from tracelake.operators.inputs import BLOCK_COLUMN
from tracelake.operators.postgres_csv import OPTIONS, decoded, selected
from tracelake.operators.postgres_types import arrow_type
from tracelake.operators.postgres_where import condition
from tracelake.secret import Secret


@dataclass(frozen=True, slots=True)
class PostgresScan:
    """``stored`` are the table's columns as they are in Postgres; ``chain`` which chain table it is, if it is one;
    ``where`` the edge's predicate as JSON; ``spans`` the blocks to read, None for all."""

    dsn: Secret
    snapshot: str
    table: str
    stored: pa.Schema
    chain: Dataset | None
    where: bytes | None = None
    spans: tuple[BlockRange, ...] | None = None

    @property
    def schema(self) -> pa.Schema:
        """Of the rows that are read."""
        return TABLES[self.chain].arrow if self.chain is not None else self.stored

    @property
    def has_blocks(self) -> bool:
        return BLOCK_COLUMN in self.stored.names

    def only(self, spans: Sequence[BlockRange]) -> PostgresScan:
        """The same within these blocks."""
        return replace(self, spans=tuple(spans))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, by a connection of one's own to the same snapshot."""
        with self.connected() as connection:
            yield from self._read(connection)

    @contextmanager
    def connected(self) -> Iterator[psycopg.Connection]:
        """A connection of one's own that sees what the scan sees, for as many tables as one likes."""
        connection = connect(self.dsn.reveal())
        try:
            with reading_errors():
                connection.execute(SQL.begin_reading)
                connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self.snapshot)))
            yield connection
        finally:
            connection.close()

    def _read(self, connection: psycopg.Connection) -> Iterator[pa.RecordBatch]:
        """``where`` decides on the rows as they are read, whatever the database has left out before."""
        predicate = self.predicate
        kept = where_expression(predicate, self.schema) if predicate is not None else None
        query = sql.SQL("SELECT {} FROM {}{}").format(
            select_list(self.stored), sql.Identifier("data", self.table), self.conditions()
        )
        for batch in copied(connection, query, self.stored):
            table = pa.Table.from_batches([batch])
            if self.chain is not None:
                table = TABLES[self.chain].from_hot(table)
            yield from (table if kept is None else table.filter(kept)).to_batches()

    def cut(self) -> sql.Composable:
        """A WHERE clause for the blocks alone; empty if all are read."""
        return _clause(self._blocks())

    def conditions(self) -> sql.Composable:
        """A WHERE clause for the blocks, and for what the database can decide of ``where``."""
        found = self._blocks()
        if (predicate := self.predicate) is not None:
            read = list(self.schema)
            same = {field.name: field.type for field in self.stored if field in read}
            if (pushed := condition(predicate, same)) is not None:
                found.append(pushed)
        return _clause(found)

    def _blocks(self) -> list[sql.Composable]:
        if self.spans is None:
            return []
        block = sql.Identifier(BLOCK_COLUMN)
        between: list[sql.Composable] = [
            sql.SQL("{} BETWEEN {} AND {}").format(block, sql.Literal(span.start), sql.Literal(span.end))
            for span in self.spans
        ]
        return [sql.SQL("({})").format(sql.SQL(" OR ").join(between or [sql.SQL("false")]))]

    @property
    def predicate(self) -> Predicate | None:
        if self.where is None:
            return None
        tree: Predicate = msgspec.json.decode(self.where, type=Predicate)
        return tree


def open_scan(
    data: DataDatabase, dataset_version: UUID, *, predicate: Predicate | None = None
) -> PostgresScan | None:
    """Of what the attempt's snapshot has of a dataset version; None when nothing has been committed to it yet."""
    snapshot = data.snapshot()
    with reading_errors():
        stored = stored_columns(snapshot.connection, dataset_version)
    if stored is None:
        return None
    return PostgresScan(
        dsn=Secret(data.reading_dsn),
        snapshot=snapshot.name,
        table=table_of(dataset_version),
        stored=stored,
        chain=chain_table(stored),
        where=None if predicate is None else msgspec.json.encode(predicate),
    )


def stored_columns(connection: psycopg.Connection, dataset_version: UUID) -> pa.Schema | None:
    found = connection.execute(SQL.columns, [f"data.{table_of(dataset_version)}"]).fetchall()
    return pa.schema([(name, arrow_type(kind)) for name, kind in found]) if found else None


def table_of(dataset_version: UUID) -> str:
    return f"d_{dataset_version.hex}"


def chain_table(stored: pa.Schema) -> Dataset | None:
    """The chain table that has exactly these columns."""
    names = set(stored.names)
    return next((dataset for dataset, table in TABLES.items() if set(table.postgres_types) == names), None)


def copied(
    connection: psycopg.Connection, query: sql.Composable, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of a query whose columns are ``selected`` ones of this schema."""
    statement = sql.SQL("COPY ({}) TO STDOUT ({})").format(query, sql.SQL(OPTIONS))
    with reading_errors():
        connection.execute(SQL.plain_text)
        with connection.cursor() as cursor, cursor.copy(statement) as rows:
            yield from decoded(rows, schema)


def _clause(conditions: Sequence[sql.Composable]) -> sql.Composable:
    return sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(conditions)) if conditions else sql.SQL("")


def select_list(schema: pa.Schema) -> sql.Composed:
    return sql.SQL(", ").join(selected(field.name, field.type) for field in schema)


@contextmanager
def reading_errors() -> Iterator[None]:
    """Errors of the database in the platform's own terms."""
    try:
        yield
    except psycopg.Error as error:
        raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error
    except pa.ArrowInvalid as error:
        raise Invalid("InputUnreadable", f"a stored value can't be read: {error}") from error
