"""Staging tables of Postgres outputs: loaded here by COPY, by this process or by executors; committed by the
wrapper.

Tables are made by functions of the data database, which own them: the attempt's login may call these and insert,
and nothing else. A table has the first rows' columns, in the types of the hot table. A commit gets names and
counts of tables: it takes exactly those and refuses other counts, so neither a database that has crashed and
emptied them nor a process that goes on loading can change what is committed.

Every Spark task that has rows asks for a table of its own, and reports it when it is done. A task that runs twice
loads two, and only the one whose report Spark accepts is committed; a zombie can't add a row to anything reported.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.contracts.operator_protocol import StagedRows, StagedTable
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.table_layout import PLAIN, TableLayout
from tracelake.settings import Secret
from tracelake.tables.data_database import SQL, DataDatabase, connect
from tracelake.tables.postgres_csv import OPTIONS, encoded
from tracelake.tables.stored_types import as_table, checked_type, column_type, in_stored_form, stored_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_REUSED_ROWS = 20_000
"""A table that is emptied again and again keeps its deleted rows for a while: after this many rows a new one is
cheaper to read."""
_REPORTED = pa.schema(
    [("name", pa.string()), ("rows", pa.int64()), ("reason", pa.string()), ("problem", pa.string())]
)
_REPORTED_DDL = "name string, rows bigint, reason string, problem string"


@dataclass(frozen=True, slots=True)
class StagingPlace:
    """The place where executors load parts of an output: tables like this one, see ``StagingPart``."""

    dsn: Secret
    like: str


class Staging:
    """The staged rows of the output with this number. ``reused`` when the attempt commits again and again: then its
    table is made once and emptied by each commit, since making one takes longer than loading a block."""

    def __init__(self, data: DataDatabase, output: int, *, reused: bool) -> None:
        self._data = data
        self._output = output
        self._reused = reused
        self._main = ""
        self._made = False
        self._types: dict[str, str] = {}
        self._columns: pa.Schema | None = None
        self._rows = 0
        self._rows_of_table = 0
        self._parts: list[StagedTable] = []
        self._layout: TableLayout = PLAIN
        self._pending = False
        self._committing = False
        self._kept = False
        self._broken = False
        self._in_parts = False

    @property
    def pending(self) -> bool:
        """Whether anything was staged that isn't committed yet."""
        return self._pending

    def load(self, data: Any, types: dict[str, str], layout: TableLayout | None) -> int:
        # A commit was begun and not confirmed, so its tables may be taken already.
        if self._committing:
            self._begin_anew()
        self._check_whole()
        # If nothing else is staged, a failed load can be forgotten; otherwise other rows are in the same table.
        alone = not self._pending
        try:
            return self._load(data, types, layout)
        except Invalid:
            # Refused rows are not in the table.
            raise
        except BaseException:
            # The rows may be in the table or not.
            if alone:
                self._begin_anew()
            else:
                self._broken = True
            raise

    def _load(self, data: Any, types: dict[str, str], layout: TableLayout | None) -> int:
        # By its name: where there is no Spark, there is nothing to import.
        if type(data).__module__.startswith("pyspark."):
            self._make_table(staged_schema(data), types, layout)
            self._in_parts = True
            # Executors load tables of their own, with the columns of the main one.
            parts = load_dataframe(data, self._data.dsn, self._main)
            self._parts += parts
            return sum(part.rows for part in parts)
        table = as_table(data)
        self._make_table(table.schema, types, layout)
        with data_errors():
            copy_rows(self._data.staging(), self._main, table)
        self._rows += table.num_rows
        return int(table.num_rows)

    def open_parts(
        self, columns: pa.Schema, types: dict[str, str], layout: TableLayout | None
    ) -> StagingPlace:
        """Where executors may load rows of these columns by themselves; ``add_parts`` reports their tables."""
        if self._committing:
            self._begin_anew()
        self._check_whole()
        self._make_table(columns, types, layout)
        self._in_parts = True
        return StagingPlace(Secret(self._data.dsn), self._main)

    def add_parts(self, parts: Sequence[StagedTable]) -> None:
        self._parts += parts

    def prepare_commit(self, output_index: int) -> StagedRows | None:
        """The tables that a commit takes; the same ones when it failed and is tried again."""
        if not self._pending:
            return None
        self._check_whole()
        # Until ``committed``: rows that are staged meanwhile must not go into tables that the commit takes.
        self._committing = True
        self._kept = self._reused and self._rows_of_table + self._rows < _REUSED_ROWS and not self._parts
        return StagedRows(
            output_index=output_index,
            tables=[StagedTable(self._main, self._rows), *self._parts],
            layout=self._layout,
            kept=self._kept,
        )

    def committed(self) -> None:
        """The commit has taken all that was staged, and emptied or dropped its tables."""
        # A commit for which nothing was staged has taken nothing.
        if self._committing:
            self._made = self._kept
            self._rows_of_table = self._rows_of_table + self._rows if self._kept else 0
            self._rows, self._parts = 0, []
            self._pending = self._committing = False

    def drop(self) -> None:
        """Drop the remaining tables when the attempt is over. If it fails, the next attempt sweeps them."""
        if not self._data.is_staging:
            return
        with suppress(psycopg.Error):
            if self._in_parts:
                self._data.staging().execute(SQL.discard_output, [self._output])
            elif self._made:
                self._data.staging().execute(SQL.discard, [[self._main]])

    def discard(self) -> None:
        """Forget the rows staged since the last commit: they won't be committed, or their tables may be gone."""
        self.drop()
        self._begin_anew()

    def _check_whole(self) -> None:
        if self._broken:
            raise Unavailable(
                "StagingBroken",
                "a load has failed: discard what was staged since the last commit, and stage it again",
            )

    def _begin_anew(self) -> None:
        """Go on with new tables: a commit has failed, perhaps after it had emptied the old ones."""
        self._made = self._pending = self._committing = self._broken = False
        self._rows, self._rows_of_table, self._parts = 0, 0, []

    def _make_table(self, columns: pa.Schema, types: dict[str, str], layout: TableLayout | None) -> None:
        self._layout = layout or self._layout
        if not self._made or columns != self._columns or types != self._types:
            declared = _declared(columns, types)
            # One staging table has one set of columns, and the rows before these are in it.
            if self._made and self._pending:
                raise Invalid("RowsRefused", "these rows have other columns than those staged before them")
            with data_errors():
                if self._made:
                    self._data.staging().execute(SQL.discard, [[self._main]])
                self._main = open_staging_table(
                    self._data.staging(), SQL.open_table, [self._output, declared]
                )
            self._made, self._columns, self._types = True, columns, types
        self._pending = True


def copy_rows(connection: psycopg.Connection, name: str, table: pa.Table) -> None:
    columns = sql.SQL(", ").join(map(sql.Identifier, table.column_names))
    statement = sql.SQL("COPY {} ({}) FROM STDIN ({})").format(
        sql.Identifier("staging", name), columns, sql.SQL(OPTIONS)
    )
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for piece in encoded(table):
            copy.write(piece)


def open_staging_table(connection: psycopg.Connection, statement: str, arguments: Sequence[object]) -> str:
    """Make a staging table; returns its name."""
    row = connection.execute(statement, arguments).fetchone()
    assert row is not None
    return str(row[0])


@contextmanager
def data_errors() -> Iterator[None]:
    """Errors of the database in the platform's own terms: rows it refuses, or a database that isn't there."""
    try:
        yield
    except (
        psycopg.OperationalError,
        psycopg.errors.UndefinedTable,
        psycopg.errors.InsufficientPrivilege,
    ) as error:
        # A table or a right that is gone was swept by a newer attempt.
        raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error
    except psycopg.Error as error:
        raise Invalid("RowsRefused", f"the data database refuses the rows: {error}") from error


def _declared(schema: pa.Schema, types: dict[str, str]) -> str:
    """The columns as the data database takes them: ``[[name, type], …]``."""
    unknown = set(types) - set(schema.names)
    if unknown:
        raise Invalid("RowsRefused", f"types for columns that aren't there: {', '.join(sorted(unknown))}")
    columns = [
        [field.name, checked_type(types.get(field.name) or column_type(field.type))] for field in schema
    ]
    return msgspec.json.encode(columns).decode()


def staged_schema(frame: DataFrame) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return stored_schema(to_arrow_schema(frame.schema, timezone="UTC"))


def load_dataframe(frame: DataFrame, dsn: str, like: str) -> list[StagedTable]:
    """The rows in tables of the attempt, with the columns of its staging table ``like``."""
    load = partial(load_partition, Secret(dsn), like)
    reported = frame.mapInArrow(load, _REPORTED_DDL).toArrow().to_pylist()
    for row in reported:
        if row["problem"] is not None:
            raise Invalid(row["reason"], row["problem"])
    return [StagedTable(row["name"], row["rows"]) for row in reported]


def load_partition(
    dsn: Secret, like: str, batches: Iterator[pa.RecordBatch]
) -> Generator[pa.RecordBatch, None, None]:
    """Runs in the executors. A problem with the rows comes back as a row: an exception would be retried by Spark,
    and reach the operator as text."""
    part: StagingPart | None = None
    try:
        for batch in batches:
            if batch.num_rows:
                part = part or StagingPart(dsn, like)
                part.load(in_stored_form(pa.Table.from_batches([batch])))
    except BaseException as error:
        if part is not None:
            # Spark may run the task again, which then loads a table of its own.
            part.discard()
        if not isinstance(error, Invalid):
            raise
        problem = {"reason": error.reason, "problem": error.message}
        yield pa.RecordBatch.from_pylist([problem], schema=_REPORTED)
        # Spark expects its input to be read to the end.
        for _ in batches:
            continue
    else:
        if part is not None:
            # Before the report: nothing can be added to a table that is reported.
            part.close()
            yield pa.RecordBatch.from_pylist([{"name": part.name, "rows": part.rows}], schema=_REPORTED)


class StagingPart:
    """One Spark task's own table, of the attempt of ``like`` and with its columns."""

    def __init__(self, dsn: Secret, like: str) -> None:
        self.rows = 0
        self._connection: psycopg.Connection = connect(dsn.reveal())
        try:
            with data_errors():
                self.name = open_staging_table(self._connection, SQL.open_like, [like])
        except BaseException:
            self.close()
            raise

    def load(self, table: pa.Table) -> None:
        with data_errors():
            copy_rows(self._connection, self.name, table)
        self.rows += table.num_rows

    def discard(self) -> None:
        """Drop a table that won't be reported."""
        with suppress(psycopg.Error):
            self._connection.execute(SQL.discard, [[self.name]])
        self.close()

    def close(self) -> None:
        self._connection.close()
