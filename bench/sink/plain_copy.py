"""The limit of Postgres itself: the rows by COPY, from text that exists already."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg
from psycopg import sql

from bench.sink.records import WRITTEN


def copy_whole(dsn: str, table: str, batches: Sequence[bytes]) -> float:
    """One COPY, one transaction."""
    with psycopg.connect(dsn) as connection:
        began = time.monotonic()
        with connection.cursor().copy(_statement(table)) as copy:
            for batch in batches:
                copy.write(batch)
        connection.commit()
        return time.monotonic() - began


def copy_batches(dsn: str, table: str, batches: Sequence[bytes]) -> float:
    """A COPY and a transaction for each batch, one after the other."""
    with psycopg.connect(dsn) as connection:
        began = time.monotonic()
        for batch in batches:
            with connection.cursor().copy(_statement(table)) as copy:
                copy.write(batch)
            connection.commit()
        return time.monotonic() - began


def _statement(table: str) -> sql.Composed:
    columns = sql.SQL(", ").join(map(sql.Identifier, WRITTEN))
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(sql.Identifier("data", table), columns)
