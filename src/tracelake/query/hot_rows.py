"""The rows of hot tables for a query: read in its snapshot, into sealed memory that the engine's process maps.

Only the columns that the query uses are asked for, of the rows that the database can't leave out. They come in the
shape that the dataset has as files, so that hot and cold rows are rows of one table. What is read is bounded: hot
tables are for what is recent, and a query that wants more of one than fits is told how to ask for less.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from uuid import UUID

import msgspec
import psycopg
import pyarrow as pa

from tracelake.domain.block_range import BlockRange
from tracelake.domain.buffer_schema import PLATFORM_COLUMNS, POSTGRES_TYPES, BufferSchema
from tracelake.domain.errors import Invalid
from tracelake.domain.where import Predicate
from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES
from tracelake.operators.inputs import BLOCK_COLUMN
from tracelake.operators.postgres_scan import PostgresScan, reading_errors, scan_of_table
from tracelake.operators.postgres_types import arrow_type
from tracelake.query.relation import ResolvedRelation
from tracelake.secret import Secret

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CHAIN_OPERATORS = frozenset({"block_follower", "evm_ingest", "parquet_compact"})
_BUFFER = 1024 * 1024


class HotRowsTooMany(Exception):
    """More rows than were agreed on; the rest wasn't read."""


def find_table(connection: psycopg.Connection, version: UUID) -> PostgresScan | None:
    """The hot table of a version as the snapshot has it; None if nothing has been committed to it yet."""
    return scan_of_table(connection, version, Secret(""), "")


def known_columns(relation: ResolvedRelation) -> pa.Schema | None:
    """The columns that a relation without any rows will have, where somebody has said so."""
    if relation.buffer_schema is not None:
        return buffered_columns(relation.buffer_schema)
    known = {dataset.value: dataset for dataset in Dataset}
    if relation.operator in _CHAIN_OPERATORS and relation.output_name in known:
        return TABLES[known[relation.output_name]].arrow
    return None


def buffered_columns(schema: BufferSchema) -> pa.Schema:
    """Those that were declared, then the platform's own."""
    types = {column.name: POSTGRES_TYPES[column.type] for column in schema.columns}
    return pa.schema([(name, arrow_type(kind)) for name, kind in {**PLATFORM_COLUMNS, **types}.items()])


def narrowed(
    scan: PostgresScan,
    columns: Sequence[str],
    predicate: Predicate | None,
    spans: Sequence[BlockRange] | None,
) -> PostgresScan:
    """What is needed of a table: of ``columns`` those that it has."""
    if spans is not None and not scan.has_blocks:
        raise Invalid(
            "NotCut", f"the hot rows have no column {BLOCK_COLUMN}, so they can't be told from the cold"
        )
    own = set(scan.whole.names)
    return replace(
        scan,
        columns=tuple(name for name in columns if name in own) or (scan.whole.names[0],),
        where=None if predicate is None else msgspec.json.encode(predicate),
        decides=False,
        spans=None if spans is None else tuple(spans),
    )


def read_rows(
    scan: PostgresScan, connection: psycopg.Connection, types: pa.Schema, max_bytes: int
) -> int | None:
    """A descriptor of sealed memory with the rows as an Arrow stream, in the types that the relation has; None when
    there are none. ``HotRowsTooMany`` as soon as they are more than ``max_bytes``."""
    target = pa.schema([types.field(name) for name in scan.schema.names])
    memory = os.memfd_create("hot-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with closing(_cast(scan.read(connection), target)) as batches:
            rows = _write(batches, target, memory, max_bytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    if not rows:
        os.close(memory)
        return None
    return memory


def _write(batches: Iterator[pa.RecordBatch], schema: pa.Schema, memory: int, max_bytes: int) -> int:
    rows = size = 0
    with os.fdopen(os.dup(memory), "wb", buffering=_BUFFER) as sink, pa.ipc.new_stream(sink, schema) as out:
        for batch in batches:
            rows += batch.num_rows
            size += batch.nbytes
            if size > max_bytes:
                raise HotRowsTooMany
            out.write_batch(batch)
    return rows


def _cast(batches: Iterator[pa.RecordBatch], target: pa.Schema) -> Generator[pa.RecordBatch, None, None]:
    with reading_errors():
        for batch in batches:
            if batch.num_rows:
                yield batch if batch.schema.equals(target) else batch.cast(target)
