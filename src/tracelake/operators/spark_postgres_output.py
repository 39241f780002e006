"""Postgres outputs of Spark: executors load staging tables, the operator process hears which ones and how full.

Every Spark task that has rows asks for a table of its own, and reports it when it is done. A task
that runs twice loads two of them, and only the one whose report Spark accepts is ever committed; a zombie that goes
on can't add a row to anything that was reported.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa

from tracelake.contracts.operator_protocol import StagedTable
from tracelake.domain.errors import Invalid
from tracelake.operators.arrow_schema import in_stored_form, stored_schema
from tracelake.operators.data_database import SQL, connect
from tracelake.operators.postgres_output import copy_rows, data_errors, opened
from tracelake.secret import Secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_REPORTED = pa.schema(
    [("name", pa.string()), ("rows", pa.int64()), ("reason", pa.string()), ("problem", pa.string())]
)
_REPORTED_DDL = "name string, rows bigint, reason string, problem string"


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
    """Runs in the executors. What is wrong with the rows comes back as a row: an exception would be retried by
    Spark, and reach the operator as text."""
    part: Part | None = None
    try:
        for batch in batches:
            if batch.num_rows:
                part = part or Part(dsn, like)
                part.load(in_stored_form(pa.Table.from_batches([batch])))
    except BaseException as error:
        if part is not None:
            part.discard()
        if not isinstance(error, Invalid):
            raise
        problem = {"reason": error.reason, "problem": error.message}
        yield pa.RecordBatch.from_pylist([problem], schema=_REPORTED)
        for _ in batches:
            continue
    else:
        if part is not None:
            part.close()
            yield pa.RecordBatch.from_pylist([{"name": part.name, "rows": part.rows}], schema=_REPORTED)


class Part:
    """One Spark task's own table, of the attempt of ``like`` and with its columns."""

    def __init__(self, dsn: Secret, like: str) -> None:
        self.rows = 0
        self._connection: psycopg.Connection = connect(dsn.reveal())
        try:
            with data_errors():
                self.name = opened(self._connection, SQL.open_like, [like])
        except BaseException:
            self.close()
            raise

    def load(self, table: pa.Table) -> None:
        with data_errors():
            copy_rows(self._connection, self.name, table)
        self.rows += table.num_rows

    def discard(self) -> None:
        """Nobody will be told of it."""
        with suppress(psycopg.Error):
            self._connection.execute(SQL.discard, [[self.name]])
        self.close()

    def close(self) -> None:
        self._connection.close()
