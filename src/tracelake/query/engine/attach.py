"""Relations as a slot receives them: open descriptors, which become views under the relations' names.

A relation's rows are those of all ``files`` (Parquet, open for reading) and all ``tables`` (memory files with one
Arrow IPC stream or file each), columns matched by name and cast to the types of ``columns``. Neither means no rows.
An integer that is stored in three columns is a column of its own too (``tables.wide_integers``), computed only if
the query uses it. The service passes descriptors, never paths, so a slot can open nothing else.

``attach`` runs in the query's process. The engine itself reads Parquet through ``/proc/self/fd``: as fast as from a
path, with filters and columns pushed down. The kernel lets a descriptor be opened anew only by those who may read
the file; where the sandbox has its own user and the file is closed to others, the file is mapped into memory and
read through an Arrow dataset. Arrow tables are scanned in the memory that was passed.

Memory files are sealed by the service, since a sandbox may not make any: no query can write to one, so nothing that
a query leaves behind is read by the next. That holds for hot rows and for the file that slots warm up with.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tracelake.domain.errors import Invalid
from tracelake.postgres import sqlfiles
from tracelake.query.engine.column_types import literal, quoted
from tracelake.tables.wide_integers import WIDE_INTEGER, storage_of, text_columns, visible_columns

SQL = sqlfiles.load("tracelake.query.engine", "sql/statements.sql")
#: A path here is the number of a descriptor, so the engine must not derive columns from it.
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
    WIDE_INTEGER: "BIGNUM",
}
# A file that shrinks under a mapping kills its reader with SIGBUS.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_BUFFER_BYTES = 1024 * 1024
_WARM_UP_ROWS = pa.table(
    {
        "block_number": pa.array(range(64)),
        "address": pa.array([f"x{number}" for number in range(64)]),
        "amount": pa.array([0.5] * 64),
    }
)
WARM_UP_SCHEMA: pa.Schema = _WARM_UP_ROWS.schema


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """A column of a view: its name and type, and the stored column that it is cast from."""

    name: str
    kind: str
    stored: str


@dataclass(frozen=True, slots=True)
class AttachedView:
    """What a relation's view is made of: its columns, the paths of the ``files`` that the engine reads itself, and
    the names of its other ``sources``."""

    relation: ReceivedRelation
    columns: Sequence[ViewColumn]
    files: Sequence[str]
    sources: Sequence[str]


class AttachedRelation:
    """A relation on the service's side. It owns its descriptors: ``close`` it (or use ``with``) once ``Slot.run``
    has returned; closing twice is fine.

    ``columns`` are the relation's columns in their order. ``files`` and ``tables`` need to hold only those that the
    query uses: a column that a file or table lacks is NULL there."""

    def __init__(
        self,
        name: str,
        columns: pa.Schema,
        *,
        files: Sequence[int] = (),
        tables: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.columns = columns
        self.files = list(files)
        self.tables = list(tables)

    def bytes(self) -> int:
        return sum(os.fstat(descriptor).st_size for descriptor in (*self.files, *self.tables))

    def close(self) -> None:
        # The numbers are forgotten first: closed twice, one might be another file's by then.
        files, self.files = self.files, []
        tables, self.tables = self.tables, []
        for descriptor in (*files, *tables):
            os.close(descriptor)

    def __enter__(self) -> AttachedRelation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"AttachedRelation({self.name}, {len(self.files)} files, {len(self.tables)} tables)"


@dataclass(frozen=True, slots=True)
class ReceivedRelation:
    """The same relation in the query's process."""

    name: str
    columns: pa.Schema
    files: Sequence[int]
    tables: Sequence[int]


def path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def paths(relations: Sequence[ReceivedRelation]) -> list[str]:
    """The paths that the engine has to be allowed to open."""
    return [path_of(file) for relation in relations for file in relation.files if _can_be_opened(file)]


def attach(
    connection: duckdb.DuckDBPyConnection, relations: Sequence[ReceivedRelation]
) -> list[AttachedView]:
    views = []
    for number, relation in enumerate(relations):
        if len(relation.columns) == 0:
            raise Invalid("RelationWithoutColumns", f"{relation.name} has no columns")
        wanted = _wanted(connection, number, relation.columns)
        sources = list(_sources(connection, number, relation))
        stored = relation.columns.names
        selects = [_select(source, wanted, stored) for source in sources] or [_no_rows(wanted)]
        try:
            _create_view(connection, relation.name, selects)
        except duckdb.BinderException:
            # A file or table lacks a column. Only then are its columns looked up, since that costs a read of each.
            selects = [_select(source, wanted, columns_of(connection, source)) for source in sources]
            _create_view(connection, relation.name, selects)
        files = [path_of(file) for file in relation.files if _can_be_opened(file)]
        views.append(AttachedView(relation, wanted, files, sources[1:] if files else sources))
    return views


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, selects: Sequence[str]) -> None:
    rows = "\nUNION ALL\n".join(selects)
    connection.execute(SQL.create_view.format(name=quoted(name), rows=rows))


def _wanted(connection: duckdb.DuckDBPyConnection, number: int, columns: pa.Schema) -> list[ViewColumn]:
    visible, texts = visible_columns(columns), text_columns(columns)
    types = _types(connection, number, visible)
    return [ViewColumn(name, types[name], texts.get(name, name)) for name in visible.names]


def _types(connection: duckdb.DuckDBPyConnection, number: int, columns: pa.Schema) -> dict[str, str]:
    """The engine's names of the types. ``_TYPES`` has the usual ones: asking the engine takes most of a
    millisecond."""
    known = {field.name: _TYPES.get(field.type) for field in columns}
    found = {name: kind for name, kind in known.items() if kind is not None}
    if len(found) == len(columns):
        return found
    name = f"tracelake_{number}_columns"
    storage = pa.schema([(field.name, storage_of(field.type)) for field in columns])
    connection.register(name, storage.empty_table())
    bound = connection.sql(SQL.rows_of.format(columns="*", source=name))
    return {name: str(kind) for name, kind in zip(bound.columns, bound.types, strict=True)} | found


def _sources(connection: duckdb.DuckDBPyConnection, number: int, relation: ReceivedRelation) -> Iterator[str]:
    opened = [file for file in relation.files if _can_be_opened(file)]
    # A file with mode 0600 can't be opened anew by the sandbox's own user, but its descriptor can be mapped.
    mapped = [file for file in relation.files if not _can_be_opened(file)]
    if opened:
        yield read_parquet([path_of(file) for file in opened])
    if mapped:
        name = f"tracelake_{number}_mapped"
        connection.register(name, _mapped_dataset(mapped))
        yield name
    for index, table in enumerate(relation.tables):
        name = f"tracelake_{number}_rows_{index}"
        connection.register(name, _table(table))
        yield name


def read_parquet(files: Sequence[str]) -> str:
    return f"read_parquet([{', '.join(map(literal, files))}], {_PARQUET_OPTIONS})"


def _select(source: str, wanted: Sequence[ViewColumn], there: Collection[str]) -> str:
    """The engine drops a cast to the type that a column already has, and so pushes filters through it."""
    return SQL.rows_of.format(columns=casts(wanted, there), source=source)


def _no_rows(wanted: Sequence[ViewColumn]) -> str:
    return SQL.no_rows_of.format(columns=casts(wanted, ()), source="(VALUES (1))")


def casts(wanted: Sequence[ViewColumn], there: Collection[str]) -> str:
    # The engine ignores case in names of columns.
    names = {name.lower() for name in there}
    return ", ".join(
        f"CAST({quoted(one.stored) if one.stored.lower() in names else 'NULL'} AS {one.kind}) "
        f"AS {quoted(one.name)}"
        for one in wanted
    )


def columns_of(connection: duckdb.DuckDBPyConnection, source: str) -> list[str]:
    return connection.sql(SQL.rows_of.format(columns="*", source=source)).columns


def _can_be_opened(descriptor: int) -> bool:
    return os.access(path_of(descriptor), os.R_OK)


def _mapped(descriptor: int) -> pa.Buffer:
    size = os.fstat(descriptor).st_size
    # ``mmap`` refuses an empty file.
    return pa.py_buffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b"")


def _mapped_dataset(descriptors: Sequence[int]) -> ds.Dataset:
    form = ds.ParquetFileFormat()
    fragments = [form.make_fragment(pa.BufferReader(_mapped(descriptor))) for descriptor in descriptors]
    return ds.FileSystemDataset(fragments, fragments[0].physical_schema, form)


def _table(descriptor: int) -> pa.Table:
    """Reads an Arrow IPC file or stream."""
    buffer = _mapped(descriptor)
    if buffer.size >= 6 and buffer.slice(0, 6).to_pybytes() == b"ARROW1":
        return pa.ipc.open_file(buffer).read_all()
    return pa.ipc.open_stream(buffer).read_all()


def sealed_memory(name: str, write: Callable[[BinaryIO], None]) -> int:
    """A descriptor of a memory file that ``write`` has filled and that can't be changed any more; the caller closes
    it."""
    memory = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # The file object closes its own descriptor; ``memory`` stays open to be sealed and sent.
        with os.fdopen(os.dup(memory), "wb", buffering=_BUFFER_BYTES) as file:
            write(file)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def sealed_file() -> int:
    """A descriptor of the Parquet file that slots warm up with; the caller closes it."""
    return sealed_memory("warm-up", lambda file: pq.write_table(_WARM_UP_ROWS, file))
