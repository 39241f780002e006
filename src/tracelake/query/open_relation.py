"""Opens the relations of a query: from names to descriptors, resolved once and all of one moment.

    opener = RelationOpener(catalog, hot, store)
    async with opener.open(caller, parsed.relations, seconds=30) as opened:
        result = await slot.run(opened.relations, …)

If a query needs hot rows, the snapshot of the data database is taken first and the catalog is read after it. A
block in a committed file is read from the file, and its hot rows are hidden; any other block was hot when the
snapshot was taken, since rows are never removed before the files that hold them are committed. Whether hot rows are
needed is in the catalog too, so in that case the catalog is read twice and only the second result counts.

``ColdFiles`` opens committed files inside the object store's folder, and nothing beside it.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from tracelake.domain.dag.model import Storage
from tracelake.domain.errors import Conflict, Forbidden, Invalid, NotFound, Unavailable
from tracelake.objects.base import ObjectLocation, ObjectStore
from tracelake.query.audit import DatasetRead
from tracelake.query.caller import QueryCaller, TaskCaller
from tracelake.query.catalog import Catalog, ColdFile, ResolvedRelation, WantedBlocks, resolve
from tracelake.query.engine.attach import AttachedRelation
from tracelake.query.engine.messages import RelationUse
from tracelake.query.fit_relation import fit, has_blocks, wanted_blocks
from tracelake.query.hot_rows import (
    HotDatabase,
    HotRowsTooMany,
    HotSnapshot,
    find_table,
    known_columns,
    narrowed,
    read_rows,
)
from tracelake.tables.postgres_scan import PostgresScan
from tracelake.tables.scope import BLOCK_COLUMN
from tracelake.tables.wide_integers import WIDE_INTEGER, as_wide_integers, visible_columns

MAX_HOT_BYTES = 512 * 1024 * 1024
MAX_FILES = 4096
_MAX_SCHEMAS = 4096
#: A Parquet file ends with the length of its footer and four letters.
_TAIL = 8
_MAX_FOOTER = 4 * 1024 * 1024
_MAX_COLUMNS = 5000

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class OpenedRelations:
    """``relations`` are closed by the context of ``RelationOpener.open``; ``datasets`` are for the audit;
    ``hot_bytes``: size of the rows read from the data database."""

    relations: list[AttachedRelation] = field(default_factory=list)
    datasets: list[DatasetRead] = field(default_factory=list)
    hot_bytes: int = 0

    def close(self) -> None:
        for relation in self.relations:
            relation.close()


class RelationOpener:
    def __init__(
        self,
        catalog: Catalog,
        hot: HotDatabase,
        store: ObjectStore,
        *,
        max_hot_bytes: int = MAX_HOT_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        self._catalog = catalog
        self._hot = hot
        self._cold = ColdFiles(store)
        self._max_hot_bytes = max_hot_bytes
        self._max_files = max_files

    @asynccontextmanager
    async def open(
        self, caller: QueryCaller, uses: Mapping[str, RelationUse], *, seconds: float
    ) -> AsyncIterator[OpenedRelations]:
        """Every relation of ``uses`` (``ParsedQuery.relations``), all of one moment; closed at the end.

        Raises: ``UnknownRelation`` 404 with the known names; ``StaleAttempt``, ``StaleLease`` and ``Canceled`` 409
        for the token of an attempt that is over; ``NothingCommitted`` 409 for a dataset whose columns aren't known
        yet; ``NoRows`` 422 for a dataset that stores no rows; ``TooMuchHotData``, ``TooManyFiles``,
        ``QueryTimeout`` and ``ObjectsNotLocal`` 422; ``CatalogUnavailable``, ``DataUnavailable``, ``DataBusy``,
        ``NoDataDatabase``, ``FileMissing`` and ``FileUnreadable`` 503. A task's attempt is checked even if the
        query names no relation."""
        wanted = {name: wanted_blocks(use) for name, use in uses.items()}
        while True:
            try:
                opened = await self._open_all(caller, uses, wanted, seconds)
                break
            except _NoBlocks as found:
                # Files were left out by blocks that the relation doesn't have: start again with all of them.
                wanted[found.name] = WantedBlocks()
        try:
            yield opened
        finally:
            opened.close()

    async def check(self, caller: TaskCaller) -> None:
        """Raises ``Conflict`` if the caller's attempt isn't the current one."""
        await resolve(self._catalog, caller, {}, max_files=1)

    async def _open_all(
        self,
        caller: QueryCaller,
        uses: Mapping[str, RelationUse],
        wanted: Mapping[str, WantedBlocks],
        seconds: float,
    ) -> OpenedRelations:
        """Holds the snapshot only while it reads."""
        resolved = await resolve(self._catalog, caller, wanted, max_files=self._max_files)
        if not any(relation.needs_hot(wanted[name]) for name, relation in resolved.items()):
            return await self._attach_all(resolved, uses, wanted, None)
        async with self._hot.snapshot(seconds) as snapshot:
            resolved = await resolve(self._catalog, caller, wanted, max_files=self._max_files)
            return await self._attach_all(resolved, uses, wanted, snapshot)

    async def _attach_all(
        self,
        resolved: Mapping[str, ResolvedRelation],
        uses: Mapping[str, RelationUse],
        wanted: Mapping[str, WantedBlocks],
        snapshot: HotSnapshot | None,
    ) -> OpenedRelations:
        opened = OpenedRelations()
        try:
            for name, relation in resolved.items():
                hot = snapshot if relation.needs_hot(wanted[name]) else None
                await self._attach(opened, relation, uses[name], wanted[name], hot)
        except BaseException:
            opened.close()
            raise
        return opened

    async def _attach(
        self,
        opened: OpenedRelations,
        relation: ResolvedRelation,
        use: RelationUse,
        wanted: WantedBlocks,
        snapshot: HotSnapshot | None,
    ) -> None:
        files = relation.files or ()
        if len(files) > self._max_files:
            raise Invalid(
                "TooManyFiles",
                f"the query needs more than {self._max_files} files of {relation.name}: "
                f"narrow it by a range of {BLOCK_COLUMN}",
            )
        scan = await self._table(relation, snapshot)
        columns = await self._columns(relation, scan, wanted)
        attached = AttachedRelation(relation.name, columns)
        # Before anything is opened for it: on an error, ``close`` then reaches its descriptors.
        opened.relations.append(attached)
        opened.datasets.append(
            DatasetRead(relation.name, relation.dataset_uuid, relation.dataset_version, relation.revision)
        )
        if files:
            attached.files = await asyncio.to_thread(self._cold.open, files)
        if scan is not None and snapshot is not None:
            await self._read_hot(opened, attached, relation, use, wanted, scan, snapshot)

    async def _table(self, relation: ResolvedRelation, snapshot: HotSnapshot | None) -> PostgresScan | None:
        version = relation.rows_version
        if snapshot is None or version is None:
            return None
        return await snapshot.run(lambda connection: find_table(connection, version))

    async def _columns(
        self, relation: ResolvedRelation, scan: PostgresScan | None, wanted: WantedBlocks
    ) -> pa.Schema:
        """The relation's columns: those of its files, or of its hot table, or the declared ones."""
        if relation.sample is not None:
            columns = await asyncio.to_thread(self._cold.columns, relation.sample)
            if wanted.bounded and not has_blocks(columns):
                raise _NoBlocks(relation.name)
            return columns
        known = known_columns(relation)
        if scan is not None:
            more = [] if known is None else [field for field in known if field.name not in scan.whole.names]
            whole = as_wide_integers(scan.whole, scan.wide)
            return pa.schema([*whole, *more]) if relation.buffer_schema is not None else whole
        if known is not None:
            return known
        if relation.storage is Storage.NONE:
            raise Invalid("NoRows", f"{relation.name} has no rows: its storage is none, it has only events")
        raise Conflict("NothingCommitted", f"nothing has been committed to {relation.name} yet")

    async def _read_hot(
        self,
        opened: OpenedRelations,
        attached: AttachedRelation,
        relation: ResolvedRelation,
        use: RelationUse,
        wanted: WantedBlocks,
        scan: PostgresScan,
        snapshot: HotSnapshot,
    ) -> None:
        """The database evaluates comparisons only for columns of the same type there: the meaning depends on it."""
        same = pa.schema(
            [
                one
                for one in visible_columns(attached.columns)
                if one in list(scan.whole) or (one.type == WIDE_INTEGER and one.name in scan.wide)
            ]
        )
        spans = relation.hot_spans(wanted) if relation.hot_version is not None else None
        needed = narrowed(scan, fit(use, attached.columns).columns, fit(use, same).predicate, spans)
        left = self._max_hot_bytes - opened.hot_bytes

        def read(connection: psycopg.Connection) -> None:
            memory = read_rows(needed, connection, attached.columns, left)
            if memory is not None:
                attached.tables.append(memory)

        try:
            await snapshot.run(read)
        except HotRowsTooMany:
            raise Invalid(
                "TooMuchHotData",
                f"the query needs more than {self._max_hot_bytes // 2**20} MiB of rows that aren't in files yet: "
                f"narrow it by a range of {BLOCK_COLUMN}, or name fewer columns",
            ) from None
        opened.hot_bytes += sum(os.fstat(table).st_size for table in attached.tables)


class _NoBlocks(Exception):
    """The relation turned out to have no block column, after files were left out by blocks."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class ColdFiles:
    """Its methods block, so call them in threads. Columns are cached by the file's identity in the file system,
    never by what a manifest claims: it may claim another dataset's schema."""

    def __init__(self, store: ObjectStore) -> None:
        if store.local is None:
            raise Invalid(
                "ObjectsNotLocal", f"this service reads only a local object store, not {store.root.scheme}://"
            )
        self._scheme = store.root.scheme
        self._local = store.local
        self._schemas: OrderedDict[tuple[int, ...], pa.Schema] = OrderedDict()

    def open(self, files: Sequence[ColdFile]) -> list[int]:
        """Descriptors for reading, in the files' order; all of them or none."""
        with ExitStack() as on_error:
            opened = []
            for file in files:
                descriptor = self._open(file)
                on_error.callback(os.close, descriptor)
                opened.append(descriptor)
            # All are open: the caller closes them now.
            on_error.pop_all()
        return opened

    def columns(self, file: ColdFile) -> pa.Schema:
        with os.fdopen(self._open(file), "rb") as content:
            found = os.fstat(content.fileno())
            key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            known = self._schemas.get(key)
            if known is None:
                known = self._schemas[key] = _read_columns(content, file)
                while len(self._schemas) > _MAX_SCHEMAS:
                    self._schemas.popitem(last=False)
            return known

    def _open(self, file: ColdFile) -> int:
        location = ObjectLocation.parse(file.location)
        if location.scheme != self._scheme:
            raise Invalid(
                "ObjectsNotLocal",
                f"the dataset's files are in {location.scheme}, and this service reads only a local object store",
            )
        try:
            return self._local.open_descriptor(location)
        except (NotFound, Forbidden) as error:
            log.error("a committed file is gone", location=file.location, error=error.message)
            raise Unavailable("FileMissing", "a committed file of the dataset is gone") from error
        except OSError as error:
            raise Unavailable("ObjectsUnavailable", f"a file can't be opened: {error.strerror}") from error


def _read_columns(content: BinaryIO, file: ColdFile) -> pa.Schema:
    """Reads the footer in this process, which serves all callers; so its size, which an operator chose, is checked
    first."""
    try:
        content.seek(-_TAIL, os.SEEK_END)
        footer = int.from_bytes(content.read(4), "little")
        if footer > _MAX_FOOTER:
            raise Invalid(
                "FileTooWide",
                f"a file of the dataset describes its columns and row groups in {footer:,} bytes, "
                f"and {_MAX_FOOTER:,} is the maximum: write fewer columns or larger row groups",
            )
        content.seek(0)
        schema = pq.read_schema(content).remove_metadata()
        if len(schema) > _MAX_COLUMNS:
            raise Invalid(
                "FileTooWide",
                f"a file of the dataset has {len(schema):,} columns; the maximum is {_MAX_COLUMNS:,}",
            )
        return schema
    except (pa.ArrowException, OSError) as error:
        log.error("a committed file can't be read", location=file.location, error=str(error))
        raise Unavailable("FileUnreadable", "a committed file can't be read") from error
