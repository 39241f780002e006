"""The object store as a directory, for one machine or a shared mount.

Object stores know no links, so below the root a symbolic link is refused wherever it leads: a link from
one attempt's staging into another's, or out of the root, would make a checked name mean another file.
The root itself may be reached through one; it's resolved once, and URIs name the resolved place.
Calls run in threads, since a disk can block.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from tracelake.domain.errors import Forbidden, Invalid, NotFound, TooLarge, Unavailable
from tracelake.objects import layout
from tracelake.objects.base import ObjectStat
from tracelake.objects.directory_upload import DirectoryUpload
from tracelake.objects.disk import in_thread, sync_folder
from tracelake.objects.prefix import ObjectLocation, ObjectPrefix

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_TEMPORARY = ".tmp-"
_PIECE = 1024 * 1024


class DirectoryStore:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._root = ObjectPrefix.parse(f"file://{os.path.realpath(folder)}")

    @property
    def root(self) -> ObjectPrefix:
        return self._root

    def locate(self, text: str) -> ObjectLocation | ObjectPrefix:
        """Accepts ``file:///a/b`` and plain ``/a/b``."""
        uri = f"file://{text}" if text.startswith("/") else text
        return ObjectPrefix.parse(uri) if uri.endswith("/") else ObjectLocation.parse(uri)

    def staging_prefix(
        self, dataset_uuid: UUID, dataset_version: UUID, task_id: UUID, attempt: int, epoch: int
    ) -> ObjectPrefix:
        return layout.staging_prefix(self._root, dataset_uuid, dataset_version, task_id, attempt, epoch)

    async def stat(self, location: ObjectLocation) -> ObjectStat | None:
        return await in_thread(self._stat, location)

    async def list(self, prefix: ObjectPrefix, limit: int | None = None) -> tuple[ObjectStat, ...]:
        return await in_thread(self._list, prefix, limit)

    async def read(self, location: ObjectLocation, max_bytes: int) -> bytes:
        return await in_thread(self._read, location, max_bytes)

    async def put(self, location: ObjectLocation, content: bytes) -> None:
        await in_thread(self._put, location, content)

    async def begin_upload(self) -> DirectoryUpload:
        return await in_thread(self._begin_upload)

    async def read_pieces(self, location: ObjectLocation) -> AsyncIterator[bytes]:
        file = await in_thread(self._open, location)
        try:
            while piece := await in_thread(file.read, _PIECE):
                yield piece
        finally:
            file.close()

    async def delete_prefix(self, prefix: ObjectPrefix) -> int:
        if not layout.is_staging(self._root, prefix):
            raise Forbidden("NotStaging", f"not the staging prefix of one attempt: {prefix}")
        return await in_thread(self._delete, prefix)

    def _stat(self, location: ObjectLocation) -> ObjectStat | None:
        path = self._path(location)
        try:
            found = os.lstat(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        return ObjectStat(location, found.st_size) if stat.S_ISREG(found.st_mode) else None

    def _list(self, prefix: ObjectPrefix, limit: int | None) -> tuple[ObjectStat, ...]:
        found: list[ObjectStat] = []
        for entry in _walk(self._path(prefix)):
            if limit is not None and len(found) >= limit:
                break
            location = ObjectLocation.parse(f"file://{entry.path}")
            try:
                found.append(ObjectStat(location, entry.stat(follow_symlinks=False).st_size))
            except FileNotFoundError:
                continue
        return tuple(found)

    def _read(self, location: ObjectLocation, max_bytes: int) -> bytes:
        with self._open(location) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise TooLarge("ObjectTooLarge", f"more than {max_bytes} bytes: {location}")
        return content

    def _open(self, location: ObjectLocation) -> BinaryIO:
        return os.fdopen(self.open_descriptor(location), "rb")

    def open_descriptor(self, location: ObjectLocation) -> int:
        """For reading, at once: whoever calls is in a thread of their own, and closes it."""
        try:
            descriptor = _open_unfollowed(str(self._path(location)), os.O_RDONLY | os.O_CLOEXEC)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        except OSError as error:
            if error.errno not in (*_ABSENT, errno.EISDIR):
                raise
        raise NotFound("ObjectNotFound", f"no such object: {location}")

    def _begin_upload(self) -> DirectoryUpload:
        return DirectoryUpload(
            Path("/" + self._root.path) / f"{_TEMPORARY}{secrets.token_hex(8)}", self._path
        )

    def _put(self, location: ObjectLocation, content: bytes) -> None:
        path = self._path(location)
        if location.name.startswith(_TEMPORARY):
            raise Invalid("PrefixInvalid", f"a name reserved for unfinished writes: {location}")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def _delete(self, prefix: ObjectPrefix) -> int:
        path = self._path(prefix)
        count = sum(len(files) for _, _, files in os.walk(path))
        if path.exists():
            shutil.rmtree(path)
        return count

    def _path(self, place: ObjectLocation | ObjectPrefix) -> Path:
        if not self._root.contains(place):
            raise Forbidden("LocationOutsideRoot", f"outside of the object store: {place}")
        if not os.path.isdir("/" + self._root.path):
            raise Unavailable("ObjectsUnavailable", f"the object store's folder is gone: {self._root}")
        path = "/" + place.path.removesuffix("/")
        if os.path.realpath(path) != path:
            raise Forbidden("LocationOutsideRoot", f"reached through a symbolic link: {place}")
        return Path(path)


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Files below a folder in the order of their full names, which is how object stores list."""
    try:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=_full_name_order)
    except OSError as error:
        if error.errno in _ABSENT:
            return
        raise
    for entry in ordered:
        if entry.is_symlink():
            raise Forbidden("LocationOutsideRoot", f"a symbolic link among the objects: {entry.path}")
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(_TEMPORARY):
            yield entry


def _open_unfollowed(path: str, flags: int) -> int:
    """Neither through a link that appeared since the check, nor waiting for a pipe's other end."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _full_name_order(entry: os.DirEntry[str]) -> str:
    return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
