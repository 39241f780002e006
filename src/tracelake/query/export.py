"""A result as a Parquet file that its caller can fetch for a while, for what is too large to be answered.

Written by the service, never by the slot, from batches as they come: one row group is in memory at a time. The file
gets its name when it is complete and durable, after its audit row; what a crash leaves behind has no name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import BinaryIO
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from tracelake.contracts.query_api import TASK_EXPORTS_PATH, USER_EXPORTS_PATH, QueryExported
from tracelake.domain.errors import Invalid
from tracelake.objects.disk import in_thread
from tracelake.query.answers import Facts
from tracelake.query.engine.column_types import ColumnType, ResultForm, holds
from tracelake.query.engine.weight import weight
from tracelake.query.export_folder import ExportFile, ExportFolder, Owner
from tracelake.serving.answer import Answer, json_answer

GROUP_ROWS = 122_880
GROUP_BYTES = 64 * 1024 * 1024
_PIECE = 1024 * 1024
_COLLECT_SECONDS = 60.0
_NO_PARQUET_TYPE = frozenset({"interval", "union"})

log = structlog.get_logger(__name__)


class ParquetForm:
    """A file that would have more than ``most_bytes`` is refused, not cut: nobody exports half of a result."""

    kind = ResultForm.PARQUET
    full = False

    def __init__(self, folder: ExportFolder, owner: Owner, query_id: UUID, most_bytes: int) -> None:
        self.rows = 0
        self.location = f"file://{folder.path(owner, query_id)}"
        self._folder = folder
        self._owner = owner
        self._query_id = query_id
        self._most = most_bytes
        self._export: ExportFile | None = None
        self._writer: pq.ParquetWriter | None = None
        self._columns: Sequence[ColumnType] = ()
        self._group: list[pa.RecordBatch] = []
        self._weight = 0
        self._bytes = 0

    async def admit(self) -> None:
        """``OverQuota`` before anything is done for a caller that has no room left."""
        await in_thread(self._folder.admit, self._owner)

    async def begin(self, schema: pa.Schema, columns: Sequence[ColumnType]) -> None:
        self._columns = columns
        for name, column in zip(schema.names, columns, strict=True):
            if holds([column], _NO_PARQUET_TYPE):
                raise _unsupported(name, column)
        self._export = await in_thread(self._folder.begin, self._owner, self._query_id)
        try:
            self._writer = _writer(self._export.file, schema)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            raise _blamed(schema.empty_table(), columns) from None

    async def add(self, batch: pa.RecordBatch) -> None:
        self._group.append(batch)
        self._weight += weight(batch)
        self.rows += batch.num_rows
        if sum(each.num_rows for each in self._group) >= GROUP_ROWS or self._weight >= GROUP_BYTES:
            await in_thread(self._write_group)

    def _write_group(self) -> None:
        assert self._writer is not None
        assert self._export is not None
        if self._group:
            group, self._group, self._weight = pa.Table.from_batches(self._group), [], 0
            try:
                self._writer.write_table(group, row_group_size=GROUP_ROWS)
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
                raise _blamed(group, self._columns) from None
        if self._export.file.tell() > self._most:
            raise Invalid(
                "ExportTooLarge", f"the file would have more than {self._most} bytes; export it in parts"
            )
        self._folder.grown(self._export)

    async def seal(self) -> None:
        await in_thread(self._finish)

    def _finish(self) -> None:
        assert self._writer is not None
        assert self._export is not None
        self._write_group()
        self._writer.close()
        file = self._export.file
        file.flush()
        os.fsync(file.fileno())
        self._bytes = os.fstat(file.fileno()).st_size
        self._folder.grown(self._export)

    async def publish(self, facts: Facts) -> Answer:
        assert self._export is not None
        await in_thread(self._folder.keep, self._export)
        path = USER_EXPORTS_PATH if self._owner.attempt is None else TASK_EXPORTS_PATH
        until = self._folder.now() + self._folder.seconds
        return json_answer(
            QueryExported(
                location=self.location,
                row_count=self.rows,
                bytes=self._bytes,
                query_id=facts.query_id,
                truncated=facts.truncated,
                datasets=list(facts.datasets),
                download=f"{path}?query_id={facts.query_id}",
                expires_at=datetime.fromtimestamp(until, UTC).replace(microsecond=0),
            )
        )

    async def discard(self) -> None:
        self._writer = None
        self._group = []
        if self._export is not None:
            await in_thread(self._folder.discard, self._export)


async def collect_exports(folder: ExportFolder) -> None:
    """For ever: what is old goes, whenever the service runs."""
    while True:
        try:
            done = await asyncio.to_thread(folder.collect)
            if done.files:
                log.info("exports removed", files=done.files, bytes=done.bytes)
        except OSError as error:
            log.warning("exports can't be removed now", error=error.strerror)
        await asyncio.sleep(min(_COLLECT_SECONDS, folder.seconds / 10))


async def pieces_of(file: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await in_thread(file.read, _PIECE):
            yield piece
    finally:
        with suppress(OSError):
            file.close()


def _writer(into: BinaryIO | pa.BufferOutputStream, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(into, schema, compression="zstd", version="2.6", write_page_index=True)


def _blamed(rows: pa.Table, columns: Sequence[ColumnType]) -> Invalid:
    """Which column it is that can't be written."""
    for place, column in enumerate(columns):
        alone = rows.select([place])
        try:
            with _writer(pa.BufferOutputStream(), alone.schema) as writer:
                writer.write_table(alone)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            return _unsupported(rows.schema.names[place], column)
    return Invalid("ExportUnsupported", "the result has values that Parquet has no types for: cast them")


def _unsupported(name: str, column: ColumnType) -> Invalid:
    return Invalid(
        "ExportUnsupported",
        f"column {name!r} is {column.name}, of which Parquet can't hold every value: cast it",
    )
