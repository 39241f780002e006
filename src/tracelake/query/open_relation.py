"""From the names in a query to open descriptors: resolved once, and all of it read at one moment.

    opener = RelationOpener(catalog, hot, object_root)
    async with opener.open(caller, parsed.relations, seconds=30) as opened:
        result = await slot.run(opened.relations, …)

Where a query needs hot rows, the snapshot of the data database comes first and the catalog after it: a block that
is in a committed file is read from there, and its hot rows are hidden; any other was hot when the snapshot was
taken, since rows are never removed before the files that hold them are committed. That some are needed is seen in
the catalog too, so then it is looked at twice, and only the second look counts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pyarrow as pa

from tracelake.domain.dag.model import Storage
from tracelake.domain.errors import Conflict, Invalid
from tracelake.operators.inputs import BLOCK_COLUMN
from tracelake.operators.postgres_scan import PostgresScan
from tracelake.query.audit import DatasetRead
from tracelake.query.block_bounds import has_blocks, wanted_blocks
from tracelake.query.caller import Caller, TaskCaller
from tracelake.query.catalog import Catalog
from tracelake.query.cold_files import ColdFiles
from tracelake.query.engine.attached import AttachedRelation
from tracelake.query.engine.fit_relation import fit
from tracelake.query.engine.parsed_query import RelationUse
from tracelake.query.hot_rows import HotRowsTooMany, find_table, known_columns, narrowed, read_rows
from tracelake.query.relation import ResolvedRelation, WantedBlocks
from tracelake.query.resolve import resolve
from tracelake.query.snapshot import HotDatabase, Snapshot

MAX_HOT_BYTES = 512 * 1024 * 1024
MAX_FILES = 4096


@dataclass(slots=True)
class OpenedRelations:
    """``relations`` belong to the context that gave them; ``datasets`` are what the audit says of them;
    ``hot_bytes`` is how much was read of the data database."""

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
        object_root: Path,
        *,
        max_hot_bytes: int = MAX_HOT_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        self._catalog = catalog
        self._hot = hot
        self._cold = ColdFiles(object_root)
        self._max_hot_bytes = max_hot_bytes
        self._max_files = max_files

    @asynccontextmanager
    async def open(
        self, caller: Caller, uses: Mapping[str, RelationUse], *, seconds: float
    ) -> AsyncIterator[OpenedRelations]:
        """Every relation of ``uses`` (``ParsedQuery.relations``), all of them at one moment; closed at the end.

        Refuses: ``UnknownRelation`` 404 with the names that there are; ``StaleAttempt``, ``StaleLease`` and
        ``Canceled`` 409 for a token of an attempt that is over; ``NothingCommitted`` 409 for a dataset whose
        columns nobody knows yet; ``NoRows`` 422 for one that has no rows by nature; ``TooMuchHotData``,
        ``TooManyFiles``, ``QueryTimeout`` and ``ObjectsNotLocal`` 422; ``CatalogUnavailable``, ``DataUnavailable``,
        ``DataBusy``, ``NoDataDatabase``, ``FileMissing`` and ``FileUnreadable`` 503. A task's attempt is checked
        also when it names no relation."""
        wanted = {name: wanted_blocks(use) for name, use in uses.items()}
        while True:
            try:
                opened = await self._open_all(caller, uses, wanted, seconds)
                break
            except _NoBlocks as found:
                wanted[found.name] = WantedBlocks()
        try:
            yield opened
        finally:
            opened.close()

    async def check(self, caller: TaskCaller) -> None:
        """Whether its attempt is still the current one; ``Conflict`` if not."""
        await resolve(self._catalog, caller, {}, max_files=1)

    async def _open_all(
        self,
        caller: Caller,
        uses: Mapping[str, RelationUse],
        wanted: Mapping[str, WantedBlocks],
        seconds: float,
    ) -> OpenedRelations:
        """The snapshot is held no longer than it takes to read from it."""
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
        snapshot: Snapshot | None,
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
        snapshot: Snapshot | None,
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
        opened.relations.append(attached)
        opened.datasets.append(
            DatasetRead(relation.name, relation.dataset_uuid, relation.dataset_version, relation.revision)
        )
        if files:
            attached.files = await asyncio.to_thread(self._cold.open, files)
        if scan is not None and snapshot is not None:
            await self._read_hot(opened, attached, relation, use, wanted, scan, snapshot)

    async def _table(self, relation: ResolvedRelation, snapshot: Snapshot | None) -> PostgresScan | None:
        version = relation.rows_version
        if snapshot is None or version is None:
            return None
        return await snapshot.run(lambda connection: find_table(connection, version))

    async def _columns(
        self, relation: ResolvedRelation, scan: PostgresScan | None, wanted: WantedBlocks
    ) -> pa.Schema:
        """The relation's columns: those of its files, or of its hot table, or those that it is known to get."""
        if relation.sample is not None:
            columns = await asyncio.to_thread(self._cold.columns, relation.sample)
            if wanted.bounded and not has_blocks(columns):
                raise _NoBlocks(relation.name)
            return columns
        known = known_columns(relation)
        if scan is not None:
            more = [] if known is None else [field for field in known if field.name not in scan.whole.names]
            return pa.schema([*scan.whole, *more]) if relation.buffer_schema is not None else scan.whole
        if known is not None:
            return known
        if relation.storage is Storage.NONE:
            raise Invalid(
                "NoRows", f"{relation.name} has no rows: its storage is none, there are only its events"
            )
        raise Conflict("NothingCommitted", f"nothing has been committed to {relation.name} yet")

    async def _read_hot(
        self,
        opened: OpenedRelations,
        attached: AttachedRelation,
        relation: ResolvedRelation,
        use: RelationUse,
        wanted: WantedBlocks,
        scan: PostgresScan,
        snapshot: Snapshot,
    ) -> None:
        """Comparisons are left to the database only where a column is the same there: types say what they mean."""
        same = pa.schema([one for one in attached.columns if one in list(scan.whole)])
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
    """A relation turned out to have no blocks, after files were left out by them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
