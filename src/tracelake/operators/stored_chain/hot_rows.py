"""Rows of a chain's hot tables, sorted as the table is, in the shape of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES
from tracelake.operators.data_database import DataDatabase
from tracelake.operators.postgres_scan import PostgresScan, copied, open_scan, select_list


def chain_scan(data: DataDatabase, version: UUID, name: str) -> tuple[Dataset, PostgresScan] | None:
    """Which of the chain's tables a hot table is, told by its columns; None while it doesn't exist."""
    scan = open_scan(data, version)
    if scan is None:
        return None
    if scan.chain is None:
        raise Invalid(
            "NotAChainTable",
            f"{name} is none of the chain's tables ({', '.join(TABLES)}): "
            f"its columns are {', '.join(scan.stored.names)}",
        )
    return scan.chain, scan


def hot_rows(connection: psycopg.Connection, scan: PostgresScan, span: BlockRange) -> Iterator[pa.Table]:
    assert scan.chain is not None
    for batch in copied(connection, _query(scan, scan.stored, span), scan.stored):
        yield TABLES[scan.chain].from_hot(pa.Table.from_batches([batch]))


def hot_columns(
    connection: psycopg.Connection, scan: PostgresScan, columns: Sequence[str], span: BlockRange
) -> pa.Table:
    """Some columns only, of kinds that are the same in both shapes."""
    schema = pa.schema([scan.stored.field(name) for name in columns])
    return pa.Table.from_batches(copied(connection, _query(scan, schema, span), schema), schema)


def _query(scan: PostgresScan, schema: pa.Schema, span: BlockRange) -> sql.Composed:
    assert scan.chain is not None
    return sql.SQL("SELECT {} FROM {}{} ORDER BY {}").format(
        select_list(schema),
        sql.Identifier("data", scan.table),
        scan.only([span]).cut(),
        sql.SQL(", ").join(map(sql.Identifier, TABLES[scan.chain].sort_by)),
    )
