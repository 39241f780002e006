"""One Parquet file below an attempt's staging prefix: written once, in sequence, hashed on the way.

The folder's name is drawn anew by every writer, so a Spark task that runs twice, or a zombie that goes on, never
meets a file that somebody else has reported. What was begun and not finished is removed; what is reported is on
the disk.
"""

from __future__ import annotations

import hashlib
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tracelake.contracts.manifest import ManifestFile
from tracelake.domain.errors import Invalid
from tracelake.objects.prefix import ObjectLocation
from tracelake.operators.parquet_layout import PLAIN, ParquetLayout
from tracelake.operators.row_groups import RowGroups


class ParquetFile:
    def __init__(
        self,
        location: ObjectLocation,
        schema: pa.Schema,
        block_column: str | None,
        layout: ParquetLayout = PLAIN,
    ) -> None:
        self._location = location
        self._schema = schema
        self._layout = layout
        self._block_column = block_column
        self._groups = RowGroups(schema)
        self._rows = 0
        self._min: int | None = None
        self._max: int | None = None
        self._path = local_path(location)
        _make_folder(self._path.parent)
        self._file = _HashedFile(self._path)
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: pa.Table) -> None:
        if rows.num_rows and self._block_column is not None:
            self._see_blocks(rows.column(self._block_column))
        self._rows += rows.num_rows
        for group in self._groups.add(rows):
            self._write(group)

    def close(self) -> ManifestFile:
        rest = self._groups.rest()
        if rest.num_rows or self._writer is None:
            self._write(rest)
        assert self._writer is not None
        if self._layout.facts:
            self._writer.add_key_value_metadata(dict(self._layout.facts))
        self._writer.close()
        size, digest = self._file.finish()
        _sync(self._path.parent)
        return ManifestFile(
            location=self._location.uri,
            rows=self._rows,
            bytes=size,
            content_hash=digest,
            min_block=self._min,
            max_block=self._max,
        )

    def discard(self) -> None:
        """Give the space back; what can't be removed now is collected later."""
        self._file.ignore_what_follows()
        with suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def _write(self, group: pa.Table) -> None:
        """One row group; nothing at all for none, as the file of a table without rows has it."""
        if self._writer is None:
            options = self._layout.writer_options(self._schema, group)
            self._writer = pq.ParquetWriter(self._file, self._schema, **options)
        if group.num_rows:
            self._writer.write_table(group, row_group_size=group.num_rows)

    def _see_blocks(self, blocks: pa.ChunkedArray) -> None:
        bounds = pc.min_max(blocks).as_py()
        if bounds["min"] is not None:
            self._min = bounds["min"] if self._min is None else min(self._min, bounds["min"])
            self._max = bounds["max"] if self._max is None else max(self._max, bounds["max"])


def local_path(location: ObjectLocation) -> Path:
    """Where an object lies on a mounted store."""
    if location.scheme != "file":
        raise Invalid("StoreUnsupported", f"this worker can't reach objects at {location.scheme}://")
    return Path("/" + location.path)


class _HashedFile(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self._ignoring = False
        self._raw = io.BufferedWriter(io.FileIO(path, "xb"))

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if not self._ignoring:
            self._digest.update(data)
            self._size += size
            self._raw.write(data)
        return size

    def ignore_what_follows(self) -> None:
        """A writer that is closed after a failure writes its footer, which may fail for the same reason."""
        self._ignoring = True

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def finish(self) -> tuple[int, str]:
        self._raw.flush()
        os.fsync(self._raw.fileno())
        self.close()
        return self._size, "sha256:" + self._digest.hexdigest()

    def close(self) -> None:
        self._raw.close()
        super().close()


def _make_folder(folder: Path) -> None:
    """With its parents, each of which is on the disk before a file in it can be reported."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _sync(new.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
