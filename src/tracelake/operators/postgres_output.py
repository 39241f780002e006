"""Staging tables of Postgres outputs: loaded here by COPY, committed by the wrapper.

Tables are made by functions of the data database, which own them: the attempt's login may call these and insert,
and nothing else. A table has the first rows' columns, in the types that the data database keeps them in. What is
handed over for a commit are names and counts: the commit takes exactly those tables and refuses other counts, so
neither a database that has crashed and emptied them nor somebody who goes on loading can change what is committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.contracts.operator_protocol import StagedRows, StagedTable
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.table_layout import PLAIN, TableLayout
from tracelake.operators.arrow_schema import as_table
from tracelake.operators.data_database import SQL, DataDatabase
from tracelake.operators.postgres_csv import OPTIONS, encoded
from tracelake.operators.postgres_types import checked_type, column_type
from tracelake.secret import Secret

_REUSED_ROWS = 20_000
"""A table that is emptied again and again keeps what was deleted for a while: after so many rows a new one is
cheaper to read."""


@dataclass(frozen=True, slots=True)
class PartPlace:
    """What an executor needs to load a part of an output, into a table like this one; see
    ``spark_postgres_output.Part``."""

    dsn: Secret
    like: str


class Staging:
    """What an attempt has staged of the output with this number. ``reused`` when it commits again and again: then
    its table is made once and emptied by each commit, since making one takes longer than loading a block."""

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
        self._handed_over = False
        self._kept = False
        self._broken = False
        self._in_parts = False

    @property
    def pending(self) -> bool:
        """Whether anything was staged that isn't committed yet."""
        return self._pending

    def load(self, data: Any, types: dict[str, str], layout: TableLayout | None) -> int:
        if self._handed_over:
            self._begin_anew()
        self._check_whole()
        alone = not self._pending
        try:
            return self._load(data, types, layout)
        except Invalid:
            # Of what is refused nothing is in the table.
            raise
        except BaseException:
            # Perhaps it is in the table, perhaps not.
            if alone:
                self._begin_anew()
            else:
                self._broken = True
            raise

    def _load(self, data: Any, types: dict[str, str], layout: TableLayout | None) -> int:
        if type(data).__module__.startswith("pyspark."):
            from tracelake.operators.spark_postgres_output import load_dataframe, staged_schema

            self._make_table(staged_schema(data), types, layout)
            self._in_parts = True
            parts = load_dataframe(data, self._data.dsn, self._main)
            self._parts += parts
            return sum(part.rows for part in parts)
        table = as_table(data)
        self._make_table(table.schema, types, layout)
        with data_errors():
            copy_rows(self._data.staging(), self._main, table)
        self._rows += table.num_rows
        return int(table.num_rows)

    def open_parts(self, columns: pa.Schema, types: dict[str, str], layout: TableLayout | None) -> PartPlace:
        """Where executors may load rows of these columns by themselves; ``add_parts`` says what they have."""
        if self._handed_over:
            self._begin_anew()
        self._check_whole()
        self._make_table(columns, types, layout)
        self._in_parts = True
        return PartPlace(Secret(self._data.dsn), self._main)

    def add_parts(self, parts: Sequence[StagedTable]) -> None:
        self._parts += parts

    def hand_over(self, output_index: int) -> StagedRows | None:
        """What a commit takes; the same again when that one failed and is tried anew."""
        if not self._pending:
            return None
        self._check_whole()
        self._handed_over = True
        self._kept = self._reused and self._rows_of_table + self._rows < _REUSED_ROWS and not self._parts
        return StagedRows(
            output_index=output_index,
            tables=[StagedTable(self._main, self._rows), *self._parts],
            layout=self._layout,
            kept=self._kept,
        )

    def committed(self) -> None:
        """The commit has taken all that was staged, and emptied or dropped its tables."""
        if self._handed_over:
            self._made = self._kept
            self._rows_of_table = self._rows_of_table + self._rows if self._kept else 0
            self._rows, self._parts = 0, []
            self._pending = self._handed_over = False

    def drop(self) -> None:
        """What is left when the attempt is over; nobody waits for it, and the next attempt sweeps as well."""
        if not self._data.is_staging:
            return
        with suppress(psycopg.Error):
            if self._in_parts:
                self._data.staging().execute(SQL.discard_output, [self._output])
            elif self._made:
                self._data.staging().execute(SQL.discard, [[self._main]])

    def discard(self) -> None:
        """What was staged since the last commit isn't going to be committed, or its tables may be gone."""
        self.drop()
        self._begin_anew()

    def _check_whole(self) -> None:
        if self._broken:
            raise Unavailable(
                "StagingBroken",
                "a load has failed: discard what was staged since the last commit, and stage it again",
            )

    def _begin_anew(self) -> None:
        """A commit has failed, perhaps after it had emptied the tables: what comes now goes elsewhere."""
        self._made = self._pending = self._handed_over = self._broken = False
        self._rows, self._rows_of_table, self._parts = 0, 0, []

    def _make_table(self, columns: pa.Schema, types: dict[str, str], layout: TableLayout | None) -> None:
        self._layout = layout or self._layout
        if not self._made or columns != self._columns or types != self._types:
            declared = _declared(columns, types)
            if self._made and self._pending:
                raise Invalid("RowsRefused", "these rows have other columns than those staged before them")
            with data_errors():
                if self._made:
                    self._data.staging().execute(SQL.discard, [[self._main]])
                self._main = opened(self._data.staging(), SQL.open_table, [self._output, declared])
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


def opened(connection: psycopg.Connection, statement: str, arguments: Sequence[object]) -> str:
    """The name of the staging table that was made for it."""
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
        # What is gone, a table or a right, was swept by a newer attempt.
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
