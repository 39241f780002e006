"""Where exported results lie until they are fetched: a folder of the service's own, bounded in size and time.

    exports/                                     0700, made by the service and by nobody else
      users/{user_id}/{query_id}.parquet         0600
      tasks/{task_id}/{attempt}/{query_id}.parquet
      .writing/{random}                          locked by whoever writes it

It isn't among the objects, which operators see. Names are made of ids alone, never of what a caller wrote. A caller
has so many files and bytes there, those that are being written included; the attempts of a task share them.
After some hours a file is removed, whether it was fetched or not. What a crash leaves behind is a file in
``.writing`` that nobody has locked; no lock outlives its process, so it can be told from one that is being written.

Calls block, so they are made in threads.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

import structlog

from tracelake.domain.errors import NotFound, OverQuota, Unavailable
from tracelake.query.caller import Caller, TaskCaller
from tracelake.query.settings import QueryLimits
from tracelake.tokens.private_files import sync_folder
from tracelake.trees import folders_of

log = structlog.get_logger(__name__)

_WRITING = ".writing"
_SUFFIX = ".parquet"
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
#: Between a file's first moment and its lock.
_YOUNG_SECONDS = 60.0
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose quota it is (``kind`` and ``owner_id``), and whose file: of a task, one attempt's."""

    kind: str
    owner_id: UUID
    attempt: int | None = None

    @classmethod
    def of(cls, caller: Caller) -> Owner:
        if isinstance(caller, TaskCaller):
            return cls("tasks", caller.task_id, caller.attempt)
        return cls("users", caller.user_id)

    @property
    def account(self) -> tuple[str, UUID]:
        return self.kind, self.owner_id


@dataclass(slots=True)
class ExportFile:
    """One in the making. ``path`` is what it will be called."""

    owner: Owner
    query_id: UUID
    path: Path
    file: BinaryIO
    temporary: Path
    kept: bool = False


@dataclass(slots=True)
class Collected:
    files: int = 0
    bytes: int = 0
    left_bytes: int = 0


@dataclass(slots=True)
class _Used:
    files: int = 0
    bytes: int = 0


@dataclass(slots=True)
class ExportFolder:
    """``earlier`` is where exports were kept before: nothing is added there, and what is old is removed."""

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

    def path(self, owner: Owner, query_id: UUID) -> Path:
        folder = self.root / owner.kind / str(owner.owner_id)
        if owner.attempt is not None:
            folder = folder / str(owner.attempt)
        return folder / f"{query_id}{_SUFFIX}"

    def admit(self, owner: Owner) -> None:
        """Before a query is run for it: is there room for one file more? ``OverQuota`` if there isn't."""
        with self._lock:
            self._check(owner, more_files=1, more_bytes=1)

    def begin(self, owner: Owner, query_id: UUID) -> ExportFile:
        self._own_folder(self.root)
        self._own_folder(self.root / _WRITING)
        temporary = self.root / _WRITING / secrets.token_hex(16)
        with self._lock:
            self._check(owner, more_files=1, more_bytes=1)
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
        """It has more bytes now. ``OverQuota`` when these are more than the caller may have."""
        with self._lock:
            self._growing[export.owner.account][export.query_id] = export.file.tell()
            self._check(export.owner)

    def keep(self, export: ExportFile) -> None:
        """Under its name from here on, and durable. Its time begins."""
        export.file.flush()
        at = self.now()
        os.utime(export.file.fileno(), (at, at))
        os.fsync(export.file.fileno())
        for _ in range(_TRIES):
            self._own_folders(export.path.parent)
            try:
                os.rename(export.temporary, export.path)
                break
            except FileNotFoundError:
                # Its folder was empty until now, and has just been removed for that.
                continue
        else:
            raise Unavailable("ExportFailed", "the exported file could not be given its name; try again")
        export.kept = True
        sync_folder(export.path.parent)
        with self._lock:
            self._total = (self._total or 0) + os.fstat(export.file.fileno()).st_size

    def discard(self, export: ExportFile) -> None:
        """Nothing is left of one that wasn't kept; called in any case."""
        self._forget(export.owner, export.query_id)
        if not export.kept:
            export.temporary.unlink(missing_ok=True)
        export.file.close()

    def open(self, owner: Owner, query_id: UUID) -> BinaryIO:
        """A file that this caller has exported; ``NotFound`` for any other, and for one whose time is over."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.fdopen(os.open(self.path(owner, query_id), flags), "rb")
        except (FileNotFoundError, NotADirectoryError):
            raise _no_export(query_id) from None
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or self._is_old(found):
            file.close()
            raise _no_export(query_id)
        return file

    def collect(self) -> Collected:
        """Remove what is old, and what nobody writes any more."""
        done = Collected()
        for root in (self.root, self.earlier):
            if root is not None and root.is_dir() and not root.is_symlink():
                _close_to_others(root)
                self._collect_files(root, done)
                self._collect_unfinished(root / _WRITING, done)
        with self._lock:
            self._total = done.left_bytes
        return done

    def _collect_files(self, root: Path, done: Collected) -> None:
        for kind in ("users", "tasks"):
            for folder, names in reversed(list(folders_of(root / kind))):
                for name in names:
                    self._collect_file(Path(folder) / name, done)
                if Path(folder) != root / kind:
                    _remove_if_empty(Path(folder))

    def _collect_file(self, path: Path, done: Collected) -> None:
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

    def _collect_unfinished(self, folder: Path, done: Collected) -> None:
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

    def _check(self, owner: Owner, *, more_files: int = 0, more_bytes: int = 0) -> None:
        limits, used = self.limits, self._used(owner)
        growing = self._growing.get(owner.account, {})
        files, size = used.files + len(growing) + more_files, used.bytes + sum(growing.values()) + more_bytes
        if files > limits.export_quota_files:
            raise OverQuota(
                "ExportQuotaExceeded",
                f"you have {files - more_files} exported files, and {limits.export_quota_files} is the most: "
                f"each is removed {limits.export_hours:g} h after it was made",
            )
        if size > limits.export_quota_bytes:
            raise OverQuota(
                "ExportQuotaExceeded",
                f"your exported files may have {limits.export_quota_bytes} bytes together: export less, or wait "
                f"until older ones are removed, {limits.export_hours:g} h after they were made",
            )
        all_growing = sum(sum(each.values()) for each in self._growing.values())
        if (self._total or 0) + all_growing + more_bytes > limits.export_total_bytes:
            raise OverQuota(
                "ExportsFull", "there is no room for more exported files now: try again later, or export less"
            )

    def _used(self, owner: Owner) -> _Used:
        """What is old counts no more, removed or not."""
        used = _Used()
        folder = self.root / owner.kind / str(owner.owner_id)
        folders = [folder] if owner.attempt is None else list(_folders(folder))
        for each in folders:
            for _, found in _files(each):
                if not self._is_old(found):
                    used.files += 1
                    used.bytes += found.st_size
        return used

    def _forget(self, owner: Owner, query_id: UUID) -> None:
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
        """Made if it isn't there. One that somebody else put there isn't used."""
        with suppress(FileExistsError):
            folder.mkdir(mode=_FOLDER_MODE, parents=folder == self.root)
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
        return


def _no_export(query_id: UUID) -> NotFound:
    return NotFound("NoSuchExport", f"you have no exported file {query_id}, or its time is over")
