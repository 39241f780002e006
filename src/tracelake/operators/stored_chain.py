"""Chain tables where they are stored, in committed files or in the data database, for executors to read.

Rows come sorted as the table is and in the shape of files, whether they are hot or cold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from psycopg import sql

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.digit_columns import with_digit_columns
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.objects.base import ObjectLocation
from tracelake.operators.chain_checks import ChainFinding, broken_seam
from tracelake.operators.inputs import Input
from tracelake.tables.data_database import DataDatabase
from tracelake.tables.hot_and_cold import blocks_without_files
from tracelake.tables.parquet import local_path
from tracelake.tables.postgres_scan import PostgresScan, copy_query, open_scan, select_list


class StoredFile(NamedTuple):
    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A chain table to read; sent to executors by pickle."""

    dataset: ChainTable
    files: tuple[StoredFile, ...] = ()
    hot: PostgresScan | None = None

    def rows(self, start: int, end: int) -> pa.Table:
        """All rows of blocks ``start`` to ``end``, sorted as the table is, in the shape of files."""
        table = TABLES[self.dataset]
        if self.hot is not None:
            with self.hot.connected() as connection:
                rows = list(read_hot_rows(connection, self.hot, BlockRange(start, end)))
            return pa.concat_tables([table.arrow.empty_table(), *rows])
        rows = [table.arrow.empty_table(), *self._from_files(start, end)]
        # Our files are sorted; files of another writer needn't be.
        return pa.concat_tables(rows).sort_by([(name, "ascending") for name in table.sort_by])

    def _from_files(self, start: int, end: int) -> Iterator[pa.Table]:
        table = TABLES[self.dataset]
        block = pc.field("block_number")
        for file in self.files:
            # Files of other blocks aren't even opened.
            if file.start <= end and file.end >= start:
                stored = pads.dataset(file.path, format="parquet", schema=table.arrow)
                rows = stored.to_table(filter=(block >= start) & (block <= end))
                there = set(pq.read_schema(file.path).names)
                yield with_digit_columns(rows, [name for name in table.digits if name not in there])


def stored_table(source: Input) -> StoredTable | None:
    """An input as a table of a chain; None while it has neither files nor rows. Files must hold the whole scope: an
    input that doesn't trigger may be behind, and a block that isn't committed yet isn't missing."""
    if source.storage == "postgres":
        found = chain_scan(source.data, source.dataset_version, f"input {source.index}")
        return None if found is None else StoredTable(found[0], hot=found[1])
    listed = source.files()
    if not listed:
        return None
    if uncommitted := blocks_without_files(source.scope, listed) if source.scope is not None else []:
        raise Unavailable(
            "InputIncomplete",
            f"blocks {uncommitted[0].partition_key} of input {source.index} aren't committed yet",
        )
    files = [_stored_file(file) for file in listed]
    names = set(pq.read_schema(files[0].path).names)
    for dataset, table in TABLES.items():
        if table.has_columns(names):
            return StoredTable(dataset, files=tuple(sorted(files, key=lambda file: file.start)))
    raise Invalid(
        "NotAChainTable",
        f"input {source.index} is none of the chain's tables ({', '.join(TABLES)}): "
        f"its columns are {', '.join(sorted(names))}",
    )


def broken_seams(source: Input, dataset: ChainTable, span: BlockRange) -> Iterator[ChainFinding]:
    """Where the blocks of ``span`` don't join the stored blocks around them, if those of ``span`` are newer.

    Otherwise it is the neighbour's check that finds it, so that one mismatch isn't reported twice."""
    if source.storage == "postgres":
        found = chain_scan(source.data, source.dataset_version, f"input {source.index}")
        table = None if found is None else StoredTable(dataset, hot=found[1])
        # Hot rows are committed upwards.
        newer = (True, False)
    else:
        listed = source.files(margin=1)
        table = StoredTable(dataset, files=tuple(map(_stored_file, listed)))
        newer = (
            _commit(listed, span.start) >= _commit(listed, span.start - 1),
            _commit(listed, span.end) > _commit(listed, span.end + 1),
        )
    if table is None:
        return
    if newer[0] and span.start and (seam := broken_seam(table.rows(span.start - 1, span.start), span.start)):
        yield seam
    if newer[1] and (
        seam := broken_seam(table.rows(span.end, span.end + 1), span.end + 1, lower_is_newer=True)
    ):
        yield seam


def _commit(files: Sequence[InputFile], block: int) -> int:
    """The place of a block's partition in the order of commits; -1 if it isn't known."""
    return max((file.partition_id or -1 for file in files if file.start <= block <= file.end), default=-1)


def _stored_file(file: InputFile) -> StoredFile:
    """The blocks that a file may hold: those it declares, or else all of its partition."""
    return StoredFile(
        str(local_path(ObjectLocation.parse(file.location))),
        file.start if file.min_block is None else file.min_block,
        file.end if file.max_block is None else file.max_block,
    )


def chain_scan(data: DataDatabase, version: UUID, name: str) -> tuple[ChainTable, PostgresScan] | None:
    """The chain table that has the columns of a hot table, and its scan; None while the hot table doesn't exist."""
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


def read_hot_rows(connection: psycopg.Connection, scan: PostgresScan, span: BlockRange) -> Iterator[pa.Table]:
    assert scan.chain is not None
    for batch in copy_query(connection, _query(scan, scan.stored, span), scan.stored):
        yield TABLES[scan.chain].from_hot(pa.Table.from_batches([batch]))


def read_hot_columns(
    connection: psycopg.Connection, scan: PostgresScan, columns: Sequence[str], span: BlockRange
) -> pa.Table:
    """Some columns only, of kinds that are the same in both shapes."""
    schema = pa.schema([scan.stored.field(name) for name in columns])
    return pa.Table.from_batches(copy_query(connection, _query(scan, schema, span), schema), schema)


def _query(scan: PostgresScan, schema: pa.Schema, span: BlockRange) -> sql.Composed:
    assert scan.chain is not None
    return sql.SQL("SELECT {} FROM {}{} ORDER BY {}").format(
        select_list(schema),
        sql.Identifier("data", scan.table),
        scan.only([span]).cut(),
        sql.SQL(", ").join(map(sql.Identifier, TABLES[scan.chain].sort_by)),
    )
