"""From which to which block a hot table has rows, now."""

from __future__ import annotations

from uuid import UUID

import psycopg
from psycopg import sql

from tracelake.domain.block_range import BlockRange
from tracelake.operators.data_database import SQL, DataDatabase
from tracelake.operators.postgres_scan import reading_errors, table_of


def stored_span(data: DataDatabase, version: UUID) -> BlockRange | None:
    """None when there are no rows, or no table yet."""
    query = sql.SQL(SQL.span).format(table=sql.Identifier("data", table_of(version)))
    with reading_errors():
        try:
            row = data.live().execute(query).fetchone()
        except psycopg.errors.UndefinedTable:
            return None
    return None if row is None or row[0] is None else BlockRange(row[0], row[1])
