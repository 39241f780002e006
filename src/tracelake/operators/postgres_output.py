"""Staging tables of Postgres outputs: loaded here by COPY, committed by the wrapper.

The role of the staging DSN can create and fill tables in the schema ``staging`` and do nothing else. A table is
made of the first rows' columns, in the types that the data database keeps them in.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.types.json import Jsonb

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.operators.arrow_schema import as_table

_SCHEME = "postgres_table:"
_BATCH_ROWS = 10_000


class Staging:
    """One staging table, for as long as it is being loaded."""

    def __init__(self, dsn: str, place: str) -> None:
        self._table = sql.Identifier("staging", place.removeprefix(_SCHEME))
        self._created = False
        try:
            self._connection = psycopg.connect(dsn, autocommit=True, connect_timeout=10)
        except psycopg.OperationalError as error:
            raise Unavailable("DataUnavailable", f"the data database can't be reached: {error}") from None

    def load(self, data: Any, types: dict[str, str]) -> int:
        table = as_table(data)
        try:
            if not self._created:
                self._connection.execute(_create(self._table, table.schema, types))
                self._created = True
            self._copy(table)
        except psycopg.OperationalError as error:
            raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error
        except psycopg.Error as error:
            raise Invalid("RowsRefused", f"the data database refuses the rows: {error}") from error
        return int(table.num_rows)

    def close(self) -> None:
        self._connection.close()

    def _copy(self, table: pa.Table) -> None:
        columns = sql.SQL(", ").join(map(sql.Identifier, table.column_names))
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(self._table, columns)
        nested = [pa.types.is_nested(field.type) for field in table.schema]
        with self._connection.cursor() as cursor, cursor.copy(statement) as copy:
            for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    copy.write_row(
                        [Jsonb(value) if deep else value for value, deep in zip(row, nested, strict=True)]
                    )


def _create(table: sql.Identifier, schema: pa.Schema, types: dict[str, str]) -> sql.Composed:
    unknown = set(types) - set(schema.names)
    if unknown:
        raise Invalid("RowsRefused", f"types for columns that aren't there: {', '.join(sorted(unknown))}")
    columns = [
        sql.SQL("{} {}").format(
            sql.Identifier(field.name), _type(types.get(field.name) or column_type(field.type))
        )
        for field in schema
    ]
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(table, sql.SQL(", ").join(columns))


def column_type(kind: pa.DataType) -> str:
    match kind:
        case _ if pa.types.is_boolean(kind):
            return "boolean"
        case _ if pa.types.is_integer(kind):
            return "bigint"
        case _ if pa.types.is_floating(kind):
            return "double precision"
        case _ if pa.types.is_decimal(kind):
            return "numeric"
        case _ if pa.types.is_timestamp(kind):
            return "timestamptz" if kind.tz else "timestamp"
        case _ if pa.types.is_date(kind):
            return "date"
        case _ if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
            return "bytea"
        case _ if pa.types.is_nested(kind):
            return "jsonb"
        case _ if pa.types.is_string(kind):
            return "text"
        case _:
            raise Invalid("RowsRefused", f"no Postgres type for {kind}")


_NUMBERS = {"smallint", "integer", "bigint", "real", "double precision", "numeric", "numeric(78,0)"}
_TIMES = {"date", "timestamp", "timestamptz"}
_TYPES = _NUMBERS | _TIMES | {"boolean", "text", "bytea", "jsonb", "uuid"}


def _type(name: str) -> sql.SQL:
    if name not in _TYPES:
        raise Invalid("RowsRefused", f"{name!r} is not a column type; one of {', '.join(sorted(_TYPES))}")
    return sql.SQL(name)
