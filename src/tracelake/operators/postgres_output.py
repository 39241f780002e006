"""Staging tables of Postgres outputs: loaded here by COPY, committed by the wrapper.

The role of the staging DSN can create and fill tables in the schema ``staging`` and do nothing else. A table is
made of the first rows' columns, in the types that the data database keeps them in. What is handed over for a
commit are names and counts: the commit takes exactly those tables and refuses other counts, so neither a database
that has crashed and emptied them nor somebody who goes on loading can change what is committed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.contracts.operator_protocol import StagedRows, StagedTable
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.table_layout import PLAIN, TableLayout
from tracelake.operators.arrow_schema import as_table
from tracelake.operators.data_database import SQL, DataDatabase
from tracelake.operators.postgres_csv import OPTIONS, encoded
from tracelake.operators.postgres_types import column_type, type_sql
from tracelake.secret import Secret

SCHEME = "postgres_table:"
_MAX_NAME = 63
_REUSED_ROWS = 20_000
"""A table that is emptied again and again keeps what was deleted for a while: after so many rows a new one is
cheaper to read."""


@dataclass(frozen=True, slots=True)
class PartPlace:
    """What an executor needs to load a part of an output; see ``spark_postgres_output.Part``."""

    dsn: Secret
    place: str
    like: str


class Staging:
    """What an attempt has staged of one output. ``reused`` when it commits again and again: then its table is made
    once and emptied by each commit, since making one takes longer than loading a block."""

    def __init__(self, data: DataDatabase, place: str, *, reused: bool) -> None:
        self._data = data
        self._place = place.removeprefix(SCHEME)
        self._reused = reused
        self._main = self._place
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
            parts = load_dataframe(data, self._data.staging_dsn, self._place, self._main)
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
        return PartPlace(Secret(self._data.staging_dsn), self._place, self._main)

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
        connection = self._data.staging()
        names = [self._main] if self._made else []
        with suppress(psycopg.Error):
            connection.execute(SQL.wait_little)
            if self._in_parts:
                prefix = part_prefix(self._place)
                names += [row[0] for row in connection.execute(SQL.staging_tables, [prefix]).fetchall()]
        for name in names:
            with suppress(psycopg.Error):
                connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier("staging", name)))
        with suppress(psycopg.Error):
            connection.execute(SQL.wait_long)

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
        self._main = part_name(self._place)
        self._made = self._pending = self._handed_over = self._broken = False
        self._rows, self._rows_of_table, self._parts = 0, 0, []

    def _make_table(self, columns: pa.Schema, types: dict[str, str], layout: TableLayout | None) -> None:
        self._layout = layout or self._layout
        if not self._made or columns != self._columns or types != self._types:
            statement = _create(self._main, columns, types)
            if self._made and self._pending:
                raise Invalid("RowsRefused", "these rows have other columns than those staged before them")
            with data_errors():
                if self._made:
                    drop = sql.SQL("DROP TABLE {}").format(sql.Identifier("staging", self._main))
                    self._data.staging().execute(drop)
                self._data.staging().execute(statement)
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


def part_name(place: str) -> str:
    """A further table of the attempt that ``place`` belongs to, which nobody else has: task and epoch stand where
    they stand in the first one's name."""
    name = part_prefix(place) + secrets.token_hex(4)
    if len(name) > _MAX_NAME:
        raise Invalid("NoStaging", f"{name!r} is too long for a staging table: no epoch is that high")
    return name


def part_prefix(place: str) -> str:
    """What the names of all such tables of the attempt begin with."""
    _, task, _, epoch, _ = place.split("_")
    return f"staging_{task}_p_{epoch}_"


@contextmanager
def data_errors() -> Iterator[None]:
    """Errors of the database in the platform's own terms: rows it refuses, or a database that isn't there."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable) as error:
        # A table that is gone was swept by a newer attempt.
        raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error
    except psycopg.Error as error:
        raise Invalid("RowsRefused", f"the data database refuses the rows: {error}") from error


def _create(name: str, schema: pa.Schema, types: dict[str, str]) -> sql.Composed:
    """Unlogged: what is staged needn't survive a crash, and what a crash has emptied is refused by its count."""
    unknown = set(types) - set(schema.names)
    if unknown:
        raise Invalid("RowsRefused", f"types for columns that aren't there: {', '.join(sorted(unknown))}")
    columns = [
        sql.SQL("{} {}").format(
            sql.Identifier(field.name), type_sql(types.get(field.name) or column_type(field.type))
        )
        for field in schema
    ]
    return sql.SQL("CREATE UNLOGGED TABLE {} ({})").format(
        sql.Identifier("staging", name), sql.SQL(", ").join(columns)
    )
