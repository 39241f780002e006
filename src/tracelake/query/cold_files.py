"""Committed files as open descriptors: of the object store's folder, and of nothing beside it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from tracelake.domain.errors import Forbidden, Invalid, NotFound, Unavailable
from tracelake.objects.directory import DirectoryStore
from tracelake.objects.prefix import ObjectLocation
from tracelake.query.relation import ColdFile

log = structlog.get_logger(__name__)

_MAX_SCHEMAS = 4096
_TAIL = 8
"""A Parquet file ends with the length of its footer and four letters."""
_MAX_FOOTER = 4 * 1024 * 1024
_MAX_COLUMNS = 5000


class ColdFiles:
    """Calls block, so they are made in threads. Columns are remembered by what the file system says of the file
    that was opened, never by what somebody says of its content: a manifest may claim another dataset's schema."""

    def __init__(self, object_root: Path) -> None:
        self._store = DirectoryStore(object_root)
        self._schemas: OrderedDict[tuple[int, ...], pa.Schema] = OrderedDict()

    def open(self, files: Sequence[ColdFile]) -> list[int]:
        """Descriptors for reading, in the files' order; all of them or none."""
        with ExitStack() as on_error:
            opened = []
            for file in files:
                descriptor = self._open(file)
                on_error.callback(os.close, descriptor)
                opened.append(descriptor)
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
        if location.scheme != self._store.root.scheme:
            raise Invalid(
                "ObjectsNotLocal",
                f"the dataset's files are in {location.scheme}, and this service reads only a local object store",
            )
        try:
            return self._store.open_descriptor(location)
        except (NotFound, Forbidden) as error:
            log.error("a committed file is gone", location=file.location, error=error.message)
            raise Unavailable("FileMissing", "a committed file of the dataset is gone") from error
        except OSError as error:
            raise Unavailable("ObjectsUnavailable", f"a file can't be opened: {error.strerror}") from error


def _read_columns(content: BinaryIO, file: ColdFile) -> pa.Schema:
    """Read in this process, which serves everybody: so what an operator wrote there is bounded first."""
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
