"""Exports: a result as a Parquet file that its caller can download for some hours, when it is too large to answer.

    exports/                                     0700, made by the service alone
      users/{user_id}/{query_id}.parquet         0600
      tasks/{task_id}/{attempt}/{query_id}.parquet
      .writing/{random}                          locked by its writer

``ParquetResultWriter`` writes the file in the service, never in the slot, from batches as they come: one row group
is in memory at a time. The file gets its name when it is complete and durable, after its audit row.

``ExportFolder`` keeps the files. It isn't part of the object store, which operators read. Names consist of ids
alone, never of a caller's text. The number and size of a caller's files are limited, unfinished ones included; the
attempts of a task share the limit. A file is removed after some hours, downloaded or not. A crash leaves an
unlocked file in ``.writing``: no lock outlives its process, so such a file is known to be abandoned.

The folder's methods block, so call them in threads.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from tracelake.contracts.query_api import TASK_EXPORTS_PATH, USER_EXPORTS_PATH, QueryExported
from tracelake.domain.errors import Invalid, NotFound, OverQuota, Unavailable
from tracelake.durable_files import sync_folder
from tracelake.objects.directory import in_thread
from tracelake.query.answers import ResultMetadata, with_types
from tracelake.query.caller import QueryCaller, TaskCaller
from tracelake.query.engine.column_types import ResultColumnType, ResultFormat, holds, weight
from tracelake.query.settings import QueryLimits
from tracelake.serving.response import Response, json_response
from tracelake.trees import folders_of

GROUP_ROWS = 122_880
GROUP_BYTES = 64 * 1024 * 1024
_PIECE = 1024 * 1024
_COLLECT_SECONDS = 60.0
_NO_PARQUET_TYPE = frozenset({"interval", "union"})
_WRITING = ".writing"
_SUFFIX = ".parquet"
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
#: A new file has no lock for a moment; younger ones aren't taken for abandoned.
_YOUNG_SECONDS = 60.0
_TRIES = 5

log = structlog.get_logger(__name__)


class ParquetResultWriter:
    """A file that would have more than ``most_bytes`` is refused, not cut: half of a result is no use in a file."""

    kind = ResultFormat.PARQUET
    full = False

    def __init__(self, folder: ExportFolder, owner: ExportOwner, query_id: UUID, most_bytes: int) -> None:
        self.rows = 0
        self.location = f"file://{folder.path(owner, query_id)}"
        self._folder = folder
        self._owner = owner
        self._query_id = query_id
        self._most = most_bytes
        self._export: ExportFile | None = None
        self._writer: pq.ParquetWriter | None = None
        self._columns: Sequence[ResultColumnType] = ()
        self._group: list[pa.RecordBatch] = []
        self._weight = 0
        self._bytes = 0

    async def admit(self) -> None:
        """Raises ``OverQuota`` for a caller without room, before the query runs."""
        await in_thread(self._folder.admit, self._owner)

    async def begin(self, schema: pa.Schema, columns: Sequence[ResultColumnType]) -> None:
        self._columns = columns
        for name, column in zip(schema.names, columns, strict=True):
            if holds([column], _NO_PARQUET_TYPE):
                raise _unsupported(name, column)
        self._export = await in_thread(self._folder.begin, self._owner, self._query_id)
        try:
            self._writer = _writer(self._export.file, with_types(schema, columns))
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
                "ExportTooLarge",
                f"the file would have more than {self._most} bytes; export the result in parts",
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

    async def publish(self, facts: ResultMetadata) -> Response:
        assert self._export is not None
        await in_thread(self._folder.keep, self._export)
        path = USER_EXPORTS_PATH if self._owner.attempt is None else TASK_EXPORTS_PATH
        until = self._folder.now() + self._folder.seconds
        return json_response(
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
    """Removes old files for as long as the service runs."""
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


def _blamed(rows: pa.Table, columns: Sequence[ResultColumnType]) -> Invalid:
    """The error that names the column that can't be written."""
    for place, column in enumerate(columns):
        alone = rows.select([place])
        try:
            with _writer(pa.BufferOutputStream(), alone.schema) as writer:
                writer.write_table(alone)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            return _unsupported(rows.schema.names[place], column)
    return Invalid("ExportUnsupported", "the result has values that Parquet has no types for: cast them")


def _unsupported(name: str, column: ResultColumnType) -> Invalid:
    return Invalid(
        "ExportUnsupported",
        f"column {name!r} is {column.name}, of which Parquet can't hold every value: cast it",
    )


@dataclass(frozen=True, slots=True)
class ExportOwner:
    """``kind`` and ``owner_id`` identify the quota; a task's file also belongs to one ``attempt``."""

    kind: str
    owner_id: UUID
    attempt: int | None = None

    @classmethod
    def of(cls, caller: QueryCaller) -> ExportOwner:
        if isinstance(caller, TaskCaller):
            return cls("tasks", caller.task_id, caller.attempt)
        return cls("users", caller.user_id)

    @property
    def account(self) -> tuple[str, UUID]:
        return self.kind, self.owner_id


@dataclass(slots=True)
class ExportFile:
    """An unfinished export at ``temporary``. ``path`` is its final name."""

    owner: ExportOwner
    query_id: UUID
    path: Path
    file: BinaryIO
    temporary: Path
    kept: bool = False


@dataclass(slots=True)
class CollectedExports:
    files: int = 0
    bytes: int = 0
    left_bytes: int = 0


@dataclass(slots=True)
class _Used:
    files: int = 0
    bytes: int = 0


@dataclass(slots=True)
class ExportFolder:
    """``earlier``: a former folder of exports; nothing is added there, and old files are removed."""

    root: Path
    limits: QueryLimits
    earlier: Path | None = None
    now: Callable[[], float] = time.time
    _growing: dict[tuple[str, UUID], dict[UUID, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _total: int | None = None

    @property
    def seconds(self) -> float:
        return self.limits.export_hours * 3600

    def path(self, owner: ExportOwner, query_id: UUID) -> Path:
        folder = self.root / owner.kind / str(owner.owner_id)
        if owner.attempt is not None:
            folder = folder / str(owner.attempt)
        return folder / f"{query_id}{_SUFFIX}"

    def admit(self, owner: ExportOwner) -> None:
        """Raises ``OverQuota`` if there is no room for another file; called before the query runs."""
        with self._lock:
            self._check(owner, more_files=1, more_bytes=1)

    def begin(self, owner: ExportOwner, query_id: UUID) -> ExportFile:
        self._own_folder(self.root)
        self._own_folder(self.root / _WRITING)
        temporary = self.root / _WRITING / secrets.token_hex(16)
        with self._lock:
            self._check(owner, more_files=1, more_bytes=1)
            # Checked and reserved under one lock: two queries can't both take the last place.
            self._growing.setdefault(owner.account, {})[query_id] = 0
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(temporary, flags, _FILE_MODE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file = os.fdopen(descriptor, "w+b")
            except BaseException:
                os.close(descriptor)
                raise
        except BaseException:
            self._forget(owner, query_id)
            raise
        return ExportFile(owner, query_id, self.path(owner, query_id), file, temporary)

    def grown(self, export: ExportFile) -> None:
        """Record the file's size. Raises ``OverQuota`` when the caller's files are too large together."""
        with self._lock:
            self._growing[export.owner.account][export.query_id] = export.file.tell()
            self._check(export.owner)

    def keep(self, export: ExportFile) -> None:
        """Give the file its name, durably. Its hours begin now."""
        export.file.flush()
        at = self.now()
        # Files expire by their time of modification, and the last write came before the audit.
        os.utime(export.file.fileno(), (at, at))
        os.fsync(export.file.fileno())
        for _ in range(_TRIES):
            self._own_folders(export.path.parent)
            try:
                os.rename(export.temporary, export.path)
                break
            except FileNotFoundError:
                # ``collect`` has just removed the folder, which was still empty.
                continue
        else:
            raise Unavailable("ExportFailed", "the exported file could not be given its name; try again")
        export.kept = True
        # A name is durable only when its folder is.
        sync_folder(export.path.parent)
        with self._lock:
            self._total = (self._total or 0) + os.fstat(export.file.fileno()).st_size

    def discard(self, export: ExportFile) -> None:
        """Close the file, and remove it unless it was kept; called in any case."""
        self._forget(export.owner, export.query_id)
        if not export.kept:
            # While the lock is held, so ``collect`` never finds an unlocked remainder.
            export.temporary.unlink(missing_ok=True)
        export.file.close()

    def open(self, owner: ExportOwner, query_id: UUID) -> BinaryIO:
        """A file that this caller has exported. Raises ``NotFound`` for any other, and for an expired one."""
        try:
            # Neither follow a link nor wait for a pipe in the file's place.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.fdopen(os.open(self.path(owner, query_id), flags), "rb")
        except (FileNotFoundError, NotADirectoryError):
            raise _no_export(query_id) from None
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or self._is_old(found):
            file.close()
            raise _no_export(query_id)
        return file

    def collect(self) -> CollectedExports:
        """Remove expired files and abandoned unfinished ones."""
        done = CollectedExports()
        for root in (self.root, self.earlier):
            if root is not None and root.is_dir() and not root.is_symlink():
                _close_to_others(root)
                self._collect_files(root, done)
                self._collect_unfinished(root / _WRITING, done)
        with self._lock:
            # Between two collections the total is kept by addition alone.
            self._total = done.left_bytes
        return done

    def _collect_files(self, root: Path, done: CollectedExports) -> None:
        for kind in ("users", "tasks"):
            # Inner folders first: an outer one can be empty only after them.
            for folder, names in reversed(list(folders_of(root / kind))):
                for name in names:
                    self._collect_file(Path(folder) / name, done)
                if Path(folder) != root / kind:
                    _remove_if_empty(Path(folder))

    def _collect_file(self, path: Path, done: CollectedExports) -> None:
        try:
            found = path.lstat()
            if self._is_old(found):
                path.unlink()
                done.files += 1
                done.bytes += found.st_size
            else:
                done.left_bytes += found.st_size
        except FileNotFoundError:
            return

    def _collect_unfinished(self, folder: Path, done: CollectedExports) -> None:
        for path, found in _files(folder):
            if self.now() - found.st_mtime < _YOUNG_SECONDS:
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                done.files += 1
                done.bytes += found.st_size
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)

    def _is_old(self, found: os.stat_result) -> bool:
        return self.now() - found.st_mtime > self.seconds

    def _check(self, owner: ExportOwner, *, more_files: int = 0, more_bytes: int = 0) -> None:
        limits, used = self.limits, self._used(owner)
        growing = self._growing.get(owner.account, {})
        files, size = used.files + len(growing) + more_files, used.bytes + sum(growing.values()) + more_bytes
        if files > limits.export_quota_files:
            raise OverQuota(
                "ExportQuotaExceeded",
                f"you have {files - more_files} exported files; the maximum is {limits.export_quota_files}: "
                f"each is removed {limits.export_hours:g} h after it was written",
            )
        if size > limits.export_quota_bytes:
            raise OverQuota(
                "ExportQuotaExceeded",
                f"your exported files may have {limits.export_quota_bytes} bytes together: export less, or wait "
                f"until older ones are removed, {limits.export_hours:g} h after they were written",
            )
        all_growing = sum(sum(each.values()) for each in self._growing.values())
        if (self._total or 0) + all_growing + more_bytes > limits.export_total_bytes:
            raise OverQuota(
                "ExportsFull", "there is no room for more exported files now: try again later, or export less"
            )

    def _used(self, owner: ExportOwner) -> _Used:
        """Expired files don't count, even if they aren't removed yet."""
        used = _Used()
        folder = self.root / owner.kind / str(owner.owner_id)
        folders = [folder] if owner.attempt is None else list(_folders(folder))
        for each in folders:
            for _, found in _files(each):
                if not self._is_old(found):
                    used.files += 1
                    used.bytes += found.st_size
        return used

    def _forget(self, owner: ExportOwner, query_id: UUID) -> None:
        with self._lock:
            growing = self._growing.get(owner.account, {})
            growing.pop(query_id, None)
            if not growing:
                self._growing.pop(owner.account, None)

    def _own_folders(self, folder: Path) -> None:
        below = folder.relative_to(self.root).parts
        for depth in range(len(below) + 1):
            self._own_folder(self.root.joinpath(*below[:depth]))

    def _own_folder(self, folder: Path) -> None:
        """Makes the folder if it is missing, and refuses one that belongs to another user."""
        with suppress(FileExistsError):
            folder.mkdir(mode=_FOLDER_MODE, parents=folder == self.root)
        # ``lstat``, because a link could lead to a folder of another user.
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            log.error("the folder for exports isn't the service's own", folder=str(folder))
            raise Unavailable("ExportsUnusable", "exported files can't be kept safely here; the log says why")
        _close_to_others(folder)


def _close_to_others(folder: Path) -> None:
    if stat.S_IMODE(folder.lstat().st_mode) != _FOLDER_MODE:
        try:
            folder.chmod(_FOLDER_MODE)
        except PermissionError:
            log.error("the folder for exports can be read by others", folder=str(folder))


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for entry in _entries(folder):
        if entry.is_file(follow_symlinks=False):
            try:
                yield Path(entry.path), entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                # ``collect`` may have just removed it.
                continue


def _folders(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        # Not empty, or already gone; ``rmdir`` never removes a folder with a new file in it.
        return


def _no_export(query_id: UUID) -> NotFound:
    return NotFound("NoSuchExport", f"you have no exported file {query_id}, or it has expired")
