"""Descriptors become views under the relations' names. Runs in the query's process.

Parquet is read by the engine itself through ``/proc/self/fd``: as fast as from a path, with filters and columns
pushed down. The kernel lets a descriptor be opened anew only by those who may read the file; where the sandbox has
a user of its own and the file is closed to others, it is mapped into memory and read through an Arrow dataset.
Rows handed in as Arrow are scanned where they lie in memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from tracelake import sqlfiles
from tracelake.domain.errors import Invalid
from tracelake.query.engine.identifiers import literal, quoted

SQL = sqlfiles.load("tracelake.query.engine.sql", "statements.sql")
_PARQUET_OPTIONS = "hive_partitioning = false, union_by_name = false, filename = false"
_TYPES: Mapping[pa.DataType, str] = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
    pa.uint32(): "UINTEGER",
    pa.uint64(): "UBIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.large_string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.large_binary(): "BLOB",
    pa.date32(): "DATE",
    pa.timestamp("us"): "TIMESTAMP",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
}


@dataclass(frozen=True, slots=True)
class Received:
    """An attached relation on this side of the socket."""

    name: str
    columns: pa.Schema
    files: Sequence[int]
    tables: Sequence[int]


def path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def paths(relations: Sequence[Received]) -> list[str]:
    """What the engine has to be allowed to open."""
    return [path_of(file) for relation in relations for file in relation.files if _can_be_opened(file)]


def attach(connection: duckdb.DuckDBPyConnection, relations: Sequence[Received]) -> None:
    for number, relation in enumerate(relations):
        if len(relation.columns) == 0:
            raise Invalid("RelationWithoutColumns", f"{relation.name} has no columns")
        types = _wanted_types(connection, number, relation.columns)
        sources = list(_sources(connection, number, relation))
        selects = [_select(source, types, types) for source in sources] or [_no_rows(types)]
        try:
            _create_view(connection, relation.name, selects)
        except duckdb.BinderException:
            # A column is missing somewhere.
            selects = [_select(source, types, _columns(connection, source)) for source in sources]
            _create_view(connection, relation.name, selects)


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, selects: Sequence[str]) -> None:
    rows = "\nUNION ALL\n".join(selects)
    connection.execute(SQL.create_view.format(name=quoted(name), rows=rows))


def _wanted_types(connection: duckdb.DuckDBPyConnection, number: int, columns: pa.Schema) -> dict[str, str]:
    """The engine's names of the types. Asking it takes most of a millisecond, and most types are these."""
    known = {field.name: _TYPES.get(field.type) for field in columns}
    found = {name: kind for name, kind in known.items() if kind is not None}
    if len(found) == len(columns):
        return found
    name = f"tracelake_{number}_columns"
    connection.register(name, columns.empty_table())
    bound = connection.sql(SQL.rows_of.format(columns="*", source=name))
    return {name: str(kind) for name, kind in zip(bound.columns, bound.types, strict=True)}


def _sources(connection: duckdb.DuckDBPyConnection, number: int, relation: Received) -> Iterator[str]:
    opened = [file for file in relation.files if _can_be_opened(file)]
    mapped = [file for file in relation.files if not _can_be_opened(file)]
    if opened:
        listed = ", ".join(literal(path_of(file)) for file in opened)
        yield f"read_parquet([{listed}], {_PARQUET_OPTIONS})"
    if mapped:
        name = f"tracelake_{number}_mapped"
        connection.register(name, _mapped_dataset(mapped))
        yield name
    for index, table in enumerate(relation.tables):
        name = f"tracelake_{number}_rows_{index}"
        connection.register(name, _table(table))
        yield name


def _select(source: str, wanted: Mapping[str, str], there: Collection[str]) -> str:
    """A cast to the type that a column has already is none: filters are pushed down through it."""
    return SQL.rows_of.format(columns=_casts(wanted, there), source=source)


def _no_rows(wanted: Mapping[str, str]) -> str:
    return SQL.no_rows_of.format(columns=_casts(wanted, ()), source="(VALUES (1))")


def _casts(wanted: Mapping[str, str], there: Collection[str]) -> str:
    names = {name.lower() for name in there}
    return ", ".join(
        f"CAST({quoted(name) if name.lower() in names else 'NULL'} AS {kind}) AS {quoted(name)}"
        for name, kind in wanted.items()
    )


def _columns(connection: duckdb.DuckDBPyConnection, source: str) -> list[str]:
    return connection.sql(SQL.rows_of.format(columns="*", source=source)).columns


def _can_be_opened(descriptor: int) -> bool:
    return os.access(path_of(descriptor), os.R_OK)


def _mapped(descriptor: int) -> pa.Buffer:
    size = os.fstat(descriptor).st_size
    return pa.py_buffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b"")


def _mapped_dataset(descriptors: Sequence[int]) -> ds.Dataset:
    form = ds.ParquetFileFormat()
    fragments = [form.make_fragment(pa.BufferReader(_mapped(descriptor))) for descriptor in descriptors]
    return ds.FileSystemDataset(fragments, fragments[0].physical_schema, form)


def _table(descriptor: int) -> pa.Table:
    """Either of the two forms of Arrow IPC."""
    buffer = _mapped(descriptor)
    if buffer.size >= 6 and buffer.slice(0, 6).to_pybytes() == b"ARROW1":
        return pa.ipc.open_file(buffer).read_all()
    return pa.ipc.open_stream(buffer).read_all()
