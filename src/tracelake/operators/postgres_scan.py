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
from tracelake.evm.columns import Column, arrow_fields
from tracelake.evm.hot_shape import from_hot
from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES
from tracelake.operators.arrow_input import where_expression
from tracelake.operators.data_database import SQL, DataDatabase, connect
from tracelake.operators.inputs import BLOCK_COLUMN
from tracelake.operators.postgres_csv import OPTIONS, decoded, selected
from tracelake.operators.postgres_types import arrow_type, is_text
from tracelake.operators.postgres_where import condition
from tracelake.secret import Secret

#: What is wrong with a value, and what is too much of a statement: trying again changes nothing.
_OWN_FAULT = ("22", "54")


@dataclass(frozen=True, slots=True)
class PostgresScan:
    """``stored`` are the table's columns as they are in Postgres, ``spelt`` those of them that are read as text
    without being text; ``chain`` which chain table it is, if it is one; ``where`` the edge's predicate as JSON, and
    ``decides`` whether it is applied to what is read, beyond what the database can leave out by it; ``spans`` the
    blocks to read and ``columns`` the columns, None for all. ``cut_by`` is the column that ``spans`` are ranges of:
    the block, or the position of a buffered dataset."""

    dsn: Secret
    snapshot: str
    table: str
    stored: pa.Schema
    chain: Dataset | None
    where: bytes | None = None
    spans: tuple[BlockRange, ...] | None = None
    spelt: frozenset[str] = frozenset()
    columns: tuple[str, ...] | None = None
    decides: bool = True
    cut_by: str = BLOCK_COLUMN

    @property
    def whole(self) -> pa.Schema:
        """The dataset's columns."""
        return TABLES[self.chain].arrow if self.chain is not None else self.stored

    @property
    def schema(self) -> pa.Schema:
        """Of the rows that are read."""
        if self.columns is None:
            return self.whole
        return pa.schema([self.whole.field(name) for name in self.columns])

    @property
    def has_blocks(self) -> bool:
        """Whether it can be cut."""
        return self.cut_by in self.stored.names

    def only(self, spans: Sequence[BlockRange]) -> PostgresScan:
        """The same within these blocks."""
        return replace(self, spans=tuple(spans))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, by a connection of one's own to the same snapshot."""
        with self.connected() as connection:
            yield from self.read(connection)

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

    def read(self, connection: psycopg.Connection) -> Iterator[pa.RecordBatch]:
        """The rows, by a connection that is in the snapshot already. ``where`` decides on them as they are read,
        whatever the database has left out before."""
        predicate = self.predicate if self.decides else None
        kept = where_expression(predicate, self.schema) if predicate is not None else None
        stored, chain = self._needed()
        query = sql.SQL("SELECT {} FROM {}{}").format(
            select_list(stored), sql.Identifier("data", self.table), self.conditions()
        )
        for batch in copied(connection, query, stored):
            table = pa.Table.from_batches([batch])
            if self.chain is not None:
                table = from_hot(table, chain)
            if self.columns is not None:
                table = table.select(list(self.columns))
            yield from (table if kept is None else table.filter(kept)).to_batches()

    def _needed(self) -> tuple[pa.Schema, list[Column]]:
        """The stored columns that the wanted ones are made of, and what they are in a chain table: several columns
        may come of one."""
        chain = [] if self.chain is None else list(TABLES[self.chain].columns)
        if self.columns is None:
            return self.stored, chain
        wanted = set(self.columns)
        if self.chain is None:
            return pa.schema([field for field in self.stored if field.name in wanted]), []
        chain = [column for column in chain if wanted & {field.name for field in arrow_fields(column)}]
        return pa.schema([self.stored.field(column.name) for column in chain]), chain

    def cut(self) -> sql.Composable:
        """A WHERE clause for the blocks alone; empty if all are read."""
        return _clause(self._blocks())

    def conditions(self) -> sql.Composable:
        """A WHERE clause for the blocks, and for what the database can decide of ``where``."""
        found = self._blocks()
        if (predicate := self.predicate) is not None:
            read = list(self.whole)
            same = {
                field.name: field.type
                for field in self.stored
                if field in read and field.name not in self.spelt
            }
            if (pushed := condition(predicate, same)) is not None:
                found.append(pushed)
        return _clause(found)

    def _blocks(self) -> list[sql.Composable]:
        if self.spans is None:
            return []
        block = sql.Identifier(self.cut_by)
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
    return scan_of_table(
        snapshot.connection, dataset_version, Secret(data.dsn), snapshot.name, predicate=predicate
    )


def scan_of_table(
    connection: psycopg.Connection,
    dataset_version: UUID,
    dsn: Secret,
    snapshot: str,
    *,
    predicate: Predicate | None = None,
) -> PostgresScan | None:
    """The same by a connection that is in the snapshot of this name."""
    with reading_errors():
        found = _columns(connection, dataset_version)
    if not found:
        return None
    stored = _schema(found)
    return PostgresScan(
        dsn=dsn,
        snapshot=snapshot,
        table=table_of(dataset_version),
        stored=stored,
        chain=chain_table(stored),
        where=None if predicate is None else msgspec.json.encode(predicate),
        spelt=frozenset(
            name for name, kind in found if arrow_type(kind) == pa.string() and not is_text(kind)
        ),
    )


def stored_columns(connection: psycopg.Connection, dataset_version: UUID) -> pa.Schema | None:
    found = _columns(connection, dataset_version)
    return _schema(found) if found else None


def _columns(connection: psycopg.Connection, dataset_version: UUID) -> list[tuple[str, str]]:
    return connection.execute(SQL.columns, [f"data.{table_of(dataset_version)}"]).fetchall()


def _schema(columns: Sequence[tuple[str, str]]) -> pa.Schema:
    return pa.schema([(name, arrow_type(kind)) for name, kind in columns])


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
        if (error.sqlstate or "").startswith(_OWN_FAULT):
            raise Invalid(
                "InputUnreadable", f"the data database can't compute what is asked of it: {error}"
            ) from error
        raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error
    except pa.ArrowInvalid as error:
        raise Invalid("InputUnreadable", f"a stored value can't be read: {error}") from error
