"""The object store as a directory, for one machine or a shared mount.

Object stores know no links, so below the root a symbolic link is refused wherever it leads: a link from
one attempt's staging into another's, or out of the root, would make a checked name mean another file. Operators
write in folders of their own below the root while we work there, so every object is opened relative to the root's
descriptor (``beneath``), judged by what was opened, and made, renamed or removed in the folder that was opened.
The root itself may be reached through a link; it's resolved once, and URIs name the resolved place.
Calls run in threads, since a disk can block.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from tracelake.domain.errors import Forbidden, Invalid, NotFound, TooLarge, Unavailable
from tracelake.objects import beneath, layout
from tracelake.objects.base import ObjectStat
from tracelake.objects.directory_upload import DirectoryUpload
from tracelake.objects.disk import in_thread
from tracelake.objects.prefix import ObjectLocation, ObjectPrefix
from tracelake.trees import remove_tree

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_TEMPORARY = ".tmp-"
_PIECE = 1024 * 1024
_MAX_DEPTH = 64
"""Of folders below a listed one: each is held open while those in it are listed."""


class DirectoryStore:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = beneath.HeldFolder(folder)
        self._root = ObjectPrefix.parse(f"file://{self._folder.path}")

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
        with self._beneath(location) as (root, path):
            try:
                found = beneath.stat_beneath(root, path)
            except beneath.LeadsElsewhere:
                raise
            except OSError as error:
                if error.errno in _ABSENT:
                    return None
                raise
        # A file with a second name may be one that whoever linked it here can't read.
        plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        return ObjectStat(location, found.st_size) if plain else None

    def _list(self, prefix: ObjectPrefix, limit: int | None) -> tuple[ObjectStat, ...]:
        found: list[ObjectStat] = []
        with self._beneath(prefix) as (root, path):
            try:
                folder = beneath.open_folder(root, path)
            except beneath.LeadsElsewhere:
                raise
            except OSError as error:
                if error.errno in _ABSENT:
                    return ()
                raise
            try:
                for below, size in _walk(folder, prefix.path, 0):
                    if limit is not None and len(found) >= limit:
                        break
                    found.append(ObjectStat(ObjectLocation.parse(f"file:///{below}"), size))
            finally:
                os.close(folder)
        return tuple(found)

    def _read(self, location: ObjectLocation, max_bytes: int) -> bytes:
        with os.fdopen(self._open_descriptor(location, only_name=True), "rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise TooLarge("ObjectTooLarge", f"more than {max_bytes} bytes: {location}")
        return content

    def _open(self, location: ObjectLocation) -> BinaryIO:
        return os.fdopen(self.open_descriptor(location), "rb")

    def open_descriptor(self, location: ObjectLocation) -> int:
        """For reading, at once: whoever calls is in a thread of their own, and closes it."""
        return self._open_descriptor(location, only_name=False)

    def _open_descriptor(self, location: ObjectLocation, *, only_name: bool) -> int:
        with self._beneath(location) as (root, path):
            try:
                return beneath.open_file(root, path, only_name=only_name)
            except beneath.LeadsElsewhere:
                raise
            except beneath.NotAFile:
                pass
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
        raise NotFound("ObjectNotFound", f"no such object: {location}")

    def _begin_upload(self) -> DirectoryUpload:
        root = self._folder.descriptor()
        return DirectoryUpload(root, f"{_TEMPORARY}{secrets.token_hex(8)}", self._make_parent)

    def _put(self, location: ObjectLocation, content: bytes) -> None:
        if location.name.startswith(_TEMPORARY):
            raise Invalid("PrefixInvalid", f"a name reserved for unfinished writes: {location}")
        temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
        folder = self._make_parent(location)
        try:
            descriptor = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o644,
                dir_fd=folder,
            )
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, location.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            os.close(folder)

    def _make_parent(self, location: ObjectLocation) -> int:
        """The folder that an object is put into, open. What lies there under the object's name is not a link."""
        with self._beneath(location) as (root, path):
            above, name = beneath.split(path)
            folder = beneath.make_folder(root, above)
            try:
                with suppress(FileNotFoundError):
                    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                        raise beneath.LeadsElsewhere(path)
            except BaseException:
                os.close(folder)
                raise
            return folder

    def _delete(self, prefix: ObjectPrefix) -> int:
        with self._beneath(prefix) as (root, path):
            above, name = beneath.split(path)
            try:
                folder = beneath.open_folder(root, above)
            except FileNotFoundError:
                return 0
            try:
                return remove_tree(name, dir_fd=folder)
            except FileNotFoundError:
                return 0
            finally:
                os.close(folder)

    @contextmanager
    def _beneath(self, place: ObjectLocation | ObjectPrefix) -> Iterator[tuple[int, str]]:
        """The root's descriptor and the place's path beneath it, for a call that refuses links."""
        if not self._root.contains(place):
            raise Forbidden("LocationOutsideRoot", f"outside of the object store: {place}")
        try:
            root = self._folder.descriptor()
        except OSError:
            raise Unavailable(
                "ObjectsUnavailable", f"the object store's folder is gone: {self._root}"
            ) from None
        try:
            yield root, place.path[len(self._root.path) :].removesuffix("/")
        except beneath.LeadsElsewhere:
            raise Forbidden("LocationOutsideRoot", f"reached through a symbolic link: {place}") from None


def _walk(folder: int, path: str, depth: int) -> Iterator[tuple[str, int]]:
    """Path and size of the files below a folder by full name, which is how object stores list."""
    if depth > _MAX_DEPTH:
        raise Invalid("PrefixInvalid", f"more than {_MAX_DEPTH} folders in each other: file:///{path[:200]}")
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=_full_name_order)
    for entry in ordered:
        below = f"{path}{entry.name}"
        if entry.is_symlink():
            raise Forbidden("LocationOutsideRoot", f"a symbolic link among the objects: /{below}")
        if entry.is_dir(follow_symlinks=False):
            try:
                inner = beneath.open_folder(folder, entry.name)
            except FileNotFoundError:
                continue
            try:
                yield from _walk(inner, f"{below}/", depth + 1)
            finally:
                os.close(inner)
        elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(_TEMPORARY):
            with suppress(FileNotFoundError):
                yield below, os.stat(entry.name, dir_fd=folder, follow_symlinks=False).st_size


def _full_name_order(entry: os.DirEntry[str]) -> str:
    return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
