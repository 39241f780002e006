"""A result as a Parquet file below the caller's own prefix, for what is too large to be answered.

Written by the service, never by the slot, from batches as they come: one row group is in memory at a time. The file
gets its name when it is complete and durable, after its audit row; what a crash leaves behind has no name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from tracelake.contracts.query_api import QueryExported
from tracelake.domain.errors import Invalid
from tracelake.objects.base import ObjectStore, Upload
from tracelake.objects.disk import in_thread
from tracelake.objects.prefix import ObjectLocation, ObjectPrefix
from tracelake.query.answers import Facts
from tracelake.query.authentication import Asker
from tracelake.query.caller import TaskCaller
from tracelake.query.engine.weight import weight
from tracelake.serving.answer import Answer, json_answer

GROUP_ROWS = 122_880
GROUP_BYTES = 64 * 1024 * 1024


def export_location(root: ObjectPrefix, asker: Asker, query_id: UUID) -> ObjectLocation:
    """Nobody but the caller is given this place, and nobody names it: it follows from who asks."""
    return _prefix(root, asker).location(f"{query_id}.parquet")


def _prefix(root: ObjectPrefix, asker: Asker) -> ObjectPrefix:
    if asker.scratch is not None and root.contains(asker.scratch):
        return ObjectPrefix.parse(asker.scratch)
    exports = root.child("exports")
    if isinstance(asker.caller, TaskCaller):
        return exports.child("tasks").child(str(asker.caller.task_id)).child(str(asker.caller.attempt))
    return exports.child("users").child(str(asker.caller.user_id))


class ParquetForm:
    """A file that would have more than ``most_bytes`` is refused, not cut: nobody exports half of a result."""

    full = False

    def __init__(self, store: ObjectStore, location: ObjectLocation, most_bytes: int) -> None:
        self.rows = 0
        self.location = location
        self._store = store
        self._most = most_bytes
        self._upload: Upload | None = None
        self._writer: pq.ParquetWriter | None = None
        self._group: list[pa.RecordBatch] = []
        self._weight = 0
        self._bytes = 0

    async def begin(self, schema: pa.Schema, types: Sequence[str]) -> None:
        self._upload = await self._store.begin_upload()
        try:
            self._writer = pq.ParquetWriter(
                self._upload.file, schema, compression="zstd", version="2.6", write_page_index=True
            )
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            raise Invalid("ExportUnsupported", _unsupported(schema, types)) from None

    async def add(self, batch: pa.RecordBatch) -> None:
        self._group.append(batch)
        self._weight += weight(batch)
        self.rows += batch.num_rows
        if sum(each.num_rows for each in self._group) >= GROUP_ROWS or self._weight >= GROUP_BYTES:
            await in_thread(self._write_group)

    def _write_group(self) -> None:
        assert self._writer is not None
        assert self._upload is not None
        if self._group:
            group, self._group, self._weight = pa.Table.from_batches(self._group), [], 0
            self._writer.write_table(group, row_group_size=GROUP_ROWS)
        if self._upload.file.tell() > self._most:
            raise Invalid(
                "ExportTooLarge", f"the file would have more than {self._most} bytes; export it in parts"
            )

    async def seal(self) -> None:
        await in_thread(self._finish)

    def _finish(self) -> None:
        assert self._writer is not None
        assert self._upload is not None
        self._write_group()
        self._writer.close()
        self._upload.file.flush()
        os.fsync(self._upload.file.fileno())
        self._bytes = os.fstat(self._upload.file.fileno()).st_size

    async def publish(self, facts: Facts) -> Answer:
        assert self._upload is not None
        await self._upload.keep(self.location)
        return json_answer(
            QueryExported(
                location=self.location.uri,
                row_count=self.rows,
                bytes=self._bytes,
                query_id=facts.query_id,
                truncated=facts.truncated,
                datasets=list(facts.datasets),
            )
        )

    async def discard(self) -> None:
        self._writer = None
        self._group = []
        if self._upload is not None:
            await self._upload.discard()


def _unsupported(schema: pa.Schema, types: Sequence[str]) -> str:
    for field, name in zip(schema, types, strict=True):
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            return f"column {field.name!r} is {name}, which Parquet has no type for: cast it"
    return "the result has columns that Parquet has no types for: cast them"
