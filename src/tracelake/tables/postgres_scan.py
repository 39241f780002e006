"""``PostgresScan``: a read of one hot table in one snapshot, planned here and run by any process.

A scan is small and goes to executors by pickle. Its rows have the shape that the dataset has as Parquet: a table
with the columns of a chain table is converted to that one, so that readers needn't know whether a dataset is hot
or cold. The columns of other tables have the types of ``stored_types``.

As much of ``where`` as the database can decide is pushed down, so that other rows aren't even sent. The final
filter is the one that files are read with (``arrow.where_expression``); a pushed condition may keep more rows than
that one, never fewer. So a column that is stored in another shape than it is read in, and a comparison that SQL
would decide otherwise, are left to the filter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

import msgspec
import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.where import And, Compare, CompareColumns, InList, IsNull, Op, Or, Predicate, WhereValue
from tracelake.evm.columns import ChainColumn, arrow_fields
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES, from_hot
from tracelake.settings import Secret
from tracelake.tables.arrow import ConstantComparison, Kind, align, kind_of, stored_as, where_expression
from tracelake.tables.data_database import SQL, DataDatabase, connect
from tracelake.tables.postgres_csv import OPTIONS, decoded, selected
from tracelake.tables.scope import BLOCK_COLUMN
from tracelake.tables.stored_types import arrow_type, is_text, is_wide_integer
from tracelake.tables.wide_integers import WIDE_INTEGER

# SQLSTATE classes of bad values and of too complex statements: trying again changes nothing.
_OWN_FAULT = ("22", "54")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AGES = 146_097 * 86_400 * 10**6
"""The microseconds of 400 years, after which the calendar repeats itself."""
_ORDERED = (Op.LT, Op.LE, Op.GT, Op.GE)
_TYPES: Mapping[Kind, str] = {
    "bool": "boolean",
    "integer": "bigint",
    "float": "double precision",
    "decimal": "numeric",
    "text": "text",
    "bytes": "bytea",
    "date": "date",
}


@dataclass(frozen=True, slots=True)
class PostgresScan:
    """``stored`` are the table's columns as they are in Postgres, ``spelt`` those of them that are read as text
    without being text, ``wide`` those of the latter that are whole numbers; ``chain`` is the chain table with these
    columns, if there is one. ``where`` is the edge's predicate as JSON, and ``decides`` whether it is applied to
    the rows that are read, beyond the part that the database applies: if not, it is a query's, for which ``wide``
    columns are numbers. ``spans`` are the blocks to read and ``columns`` the columns, None for all. ``cut_by`` is
    the column that ``spans`` are ranges of: the block, or the position of a buffered dataset."""

    dsn: Secret
    snapshot: str
    table: str
    stored: pa.Schema
    chain: ChainTable | None
    where: bytes | None = None
    spans: tuple[BlockRange, ...] | None = None
    spelt: frozenset[str] = frozenset()
    wide: frozenset[str] = frozenset()
    columns: tuple[str, ...] | None = None
    decides: bool = True
    cut_by: str = BLOCK_COLUMN

    @property
    def whole(self) -> pa.Schema:
        """The dataset's columns."""
        return TABLES[self.chain].arrow if self.chain is not None else self.stored

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows that are read."""
        if self.columns is None:
            return self.whole
        return pa.schema([self.whole.field(name) for name in self.columns])

    @property
    def has_blocks(self) -> bool:
        """Whether it can be cut to ranges."""
        return self.cut_by in self.stored.names

    def only(self, spans: Sequence[BlockRange]) -> PostgresScan:
        """The same scan within these ranges."""
        return replace(self, spans=tuple(spans))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, by a new connection to the same snapshot."""
        with self.connected() as connection:
            yield from self.read(connection)

    @contextmanager
    def connected(self) -> Iterator[psycopg.Connection]:
        """A new connection in the scan's snapshot, for any number of tables."""
        connection = connect(self.dsn.reveal())
        try:
            with reading_errors():
                connection.execute(SQL.begin_reading)
                # Postgres adopts a snapshot only before the first query of a transaction.
                connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self.snapshot)))
            yield connection
        finally:
            connection.close()

    def read(self, connection: psycopg.Connection) -> Iterator[pa.RecordBatch]:
        """The rows, by a connection that is in the snapshot already, filtered by ``where`` as they are read."""
        predicate = self.predicate if self.decides else None
        kept = where_expression(predicate, self.schema) if predicate is not None else None
        stored, chain = self._needed()
        query = sql.SQL("SELECT {} FROM {}{}").format(
            select_list(stored), sql.Identifier("data", self.table), self.conditions()
        )
        for batch in copy_query(connection, query, stored):
            table = pa.Table.from_batches([batch])
            if self.chain is not None:
                table = from_hot(table, chain)
            if self.columns is not None:
                table = table.select(list(self.columns))
            yield from (table if kept is None else table.filter(kept)).to_batches()

    def _needed(self) -> tuple[pa.Schema, list[ChainColumn]]:
        """The stored columns that the requested ones are made of, and their columns in a chain table: several may
        come of one stored column."""
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
        """A WHERE clause for the blocks, and for the part of ``where`` that the database can decide."""
        found = self._blocks()
        if (predicate := self.predicate) is not None:
            read = list(self.whole)
            same: dict[str, pa.DataType] = {
                field.name: field.type
                for field in self.stored
                if field in read and field.name not in self.spelt
            }
            if not self.decides:
                same |= dict.fromkeys(self.wide, WIDE_INTEGER)
            if (pushed := postgres_condition(predicate, same)) is not None:
                found.append(pushed)
        return _clause(found)

    def _blocks(self) -> list[sql.Composable]:
        if self.spans is None:
            return []
        block = sql.Identifier(self.cut_by)
        # Without spans nothing is read, and SQL has no empty OR.
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
    """A scan of a dataset version in the attempt's snapshot; None when nothing has been committed to it yet."""
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
    """The same, by a connection that is in the snapshot of this name."""
    with reading_errors():
        found = _columns(connection, dataset_version)
    if not found:
        return None
    stored = _schema(found)
    return PostgresScan(
        dsn=dsn,
        snapshot=snapshot,
        table=hot_table_name(dataset_version),
        stored=stored,
        chain=chain_table(stored),
        where=None if predicate is None else msgspec.json.encode(predicate),
        spelt=frozenset(
            name for name, kind in found if arrow_type(kind) == pa.string() and not is_text(kind)
        ),
        wide=frozenset(name for name, kind in found if is_wide_integer(kind)),
    )


def stored_columns(connection: psycopg.Connection, dataset_version: UUID) -> pa.Schema | None:
    found = _columns(connection, dataset_version)
    return _schema(found) if found else None


def _columns(connection: psycopg.Connection, dataset_version: UUID) -> list[tuple[str, str]]:
    return connection.execute(SQL.columns, [f"data.{hot_table_name(dataset_version)}"]).fetchall()


def _schema(columns: Sequence[tuple[str, str]]) -> pa.Schema:
    return pa.schema([(name, arrow_type(kind)) for name, kind in columns])


def hot_table_name(dataset_version: UUID) -> str:
    return f"d_{dataset_version.hex}"


def chain_table(stored: pa.Schema) -> ChainTable | None:
    """The chain table that has exactly these columns."""
    names = set(stored.names)
    return next((dataset for dataset, table in TABLES.items() if set(table.postgres_types) == names), None)


def copy_query(
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
        # A lost connection may have no SQLSTATE at all.
        if (error.sqlstate or "").startswith(_OWN_FAULT):
            raise Invalid(
                "InputUnreadable", f"the data database can't evaluate the query: {error}"
            ) from error
        raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error
    except pa.ArrowInvalid as error:
        raise Invalid("InputUnreadable", f"a stored value can't be read: {error}") from error


def postgres_condition(tree: Predicate, columns: Mapping[str, pa.DataType]) -> sql.Composable | None:
    """A condition that every row which the predicate keeps fulfils; None when there is none. ``columns`` are those
    that are stored as they are read."""
    match tree:
        case Compare(column, op, value):
            return _compare(columns, column, op, value)
        case CompareColumns(column, op, other):
            return _compare_columns(columns, column, op, other)
        case InList(column, values, negated):
            terms = [_compare(columns, column, Op.NE if negated else Op.EQ, value) for value in values]
            return _all(terms) if negated else _any(terms)
        case IsNull(column, negated):
            if column not in columns:
                return None
            test = sql.SQL("{} IS NOT NULL" if negated else "{} IS NULL")
            return test.format(sql.Identifier(column))
        case And(terms):
            return _all([postgres_condition(term, columns) for term in terms])
        case Or(terms):
            return _any([postgres_condition(term, columns) for term in terms])
        case _:
            assert_never(tree)


def _compare(
    columns: Mapping[str, pa.DataType], column: str, op: Op, value: WhereValue
) -> sql.Composable | None:
    if column not in columns:
        return None
    type_ = columns[column]
    if type_ == WIDE_INTEGER:
        return _compare_wide(column, op, value)
    kind = kind_of(type_)
    # A float4 and the literal's float8 compare differently in Postgres and in Arrow.
    if kind == "other" or type_ == pa.float32():
        return None
    if isinstance(value, str) and "\0" in value:
        # Postgres allows NUL neither in text nor in a statement.
        return None
    aligned = align(stored_as(type_), op, value)
    match aligned:
        case ConstantComparison.ALWAYS:
            return sql.SQL("{} IS NOT NULL").format(sql.Identifier(column))
        case ConstantComparison.NEVER | ConstantComparison.UNKNOWN:
            return sql.SQL("false")
        case (op, literal):
            # Files are compared by bytes, the database by its collation.
            form = "{} {} {}" if kind != "text" or op not in _ORDERED else '{} COLLATE "C" {} {}'
            return sql.SQL(form).format(sql.Identifier(column), sql.SQL(op.value), _literal(type_, literal))
        case _:
            assert_never(aligned)


def _compare_wide(column: str, op: Op, value: WhereValue) -> sql.Composable | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return sql.SQL("{} {} {}::numeric").format(
        sql.Identifier(column), sql.SQL(op.value), sql.Literal(str(value))
    )


def _compare_columns(
    columns: Mapping[str, pa.DataType], column: str, op: Op, other: str
) -> sql.Composable | None:
    if column not in columns or other not in columns:
        return None
    kinds = {kind_of(columns[name]) for name in (column, other)}
    # Text columns may have collations, floats NaN: left to the filter.
    if kinds & {"other", "float", "text"} or len(kinds) > 1 or columns[column] != columns[other]:
        return None
    return sql.SQL("{} {} {}").format(sql.Identifier(column), sql.SQL(op.value), sql.Identifier(other))


def _literal(type_: pa.DataType, value: Any) -> sql.Composable:
    """A literal with the type that it is compared in. COPY takes no parameters.

    Always text with a cast: a bare number has a type and signs of its own, and ``-9223372036854775808::bigint`` is
    the negative of a number that is no bigint."""
    if kind_of(type_) == "instant":
        zone = "timestamptz" if type_.tz else "timestamp"
        # A type without a zone leaves out the one that is written.
        return sql.SQL("{}::{}").format(sql.Literal(_instant(value)), sql.SQL(zone))
    match value:
        case bytes():
            text = "\\x" + value.hex()
        case float():
            text = repr(value)
        case bool():
            text = "true" if value else "false"
        case _:
            text = str(value)
    return sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(_TYPES[kind_of(type_)]))


def _instant(microseconds: int) -> str:
    """An instant in UTC. Its year may be one that Python doesn't have; the calendar repeats after 400 years."""
    years = 0 if abs(microseconds) < _AGES // 2 else 400 if microseconds > 0 else -400
    at = _EPOCH + timedelta(microseconds=microseconds - years // 400 * _AGES)
    year = at.year + years
    of_year = at.isoformat(sep=" ", timespec="microseconds").partition("-")[2]
    return f"{year:04}-{of_year}" if year > 0 else f"{1 - year:04}-{of_year} BC"


def _all(terms: Sequence[sql.Composable | None]) -> sql.Composable | None:
    # Without a term that can't be decided, a conjunction only keeps more rows.
    known = [term for term in terms if term is not None]
    return _joined(known, " AND ") if known else None


def _any(terms: Sequence[sql.Composable | None]) -> sql.Composable | None:
    known = [term for term in terms if term is not None]
    # One term that the database can't decide may keep any row, so nothing can be left out.
    return _joined(known, " OR ") if len(known) == len(terms) else None


def _joined(terms: Sequence[sql.Composable], word: str) -> sql.Composable:
    return sql.SQL("({})").format(sql.SQL(word).join(terms))
