"""The object store as a directory, for one machine or a shared mount.

Object stores have no links, so below the root a symbolic link is refused wherever it leads: a link from one
attempt's staging into another's, or out of the root, would make a checked name mean another file. Operators write
in folders of their own below the root at the same time, so every object is opened relative to the root's
descriptor (``beneath``), judged by the descriptor, and made, renamed or removed in the opened folder. The root
itself may be reached through a link; it is resolved once, and URIs name the resolved place.

An upload is a temporary file below the root, so on the same disk, that is renamed when complete; a crash leaves a
hidden file that no listing shows. Calls run in threads, since a disk can block.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar
from uuid import UUID

from tracelake.domain.errors import Forbidden, Invalid, NotFound, TooLarge, Unavailable
from tracelake.objects import base, beneath
from tracelake.objects.base import ObjectLocation, ObjectPrefix, ObjectStat
from tracelake.trees import remove_tree

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_TEMPORARY = ".tmp-"
_PIECE = 1024 * 1024
_MAX_DEPTH = 64
"""Maximum depth of folders below a listed one: each is held open while its content is listed."""
P = ParamSpec("P")
T = TypeVar("T")


class DirectoryStore:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = beneath.HeldFolder(folder)
        self._root = ObjectPrefix.parse(f"file://{self._folder.path}")

    @property
    def root(self) -> ObjectPrefix:
        return self._root

    @property
    def local(self) -> DirectoryStore:
        return self

    @property
    def folder(self) -> Path:
        return self._folder.path

    def locate(self, text: str) -> ObjectLocation | ObjectPrefix:
        """Accepts ``file:///a/b`` and plain ``/a/b``."""
        uri = f"file://{text}" if text.startswith("/") else text
        return ObjectPrefix.parse(uri) if uri.endswith("/") else ObjectLocation.parse(uri)

    def staging_prefix(
        self, dataset_uuid: UUID, dataset_version: UUID, task_id: UUID, attempt: int, epoch: int
    ) -> ObjectPrefix:
        return base.staging_prefix(self._root, dataset_uuid, dataset_version, task_id, attempt, epoch)

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
        if not base.is_staging(self._root, prefix):
            raise Forbidden("NotStaging", f"not the staging prefix of one attempt: {prefix}")
        return await in_thread(self._delete, prefix)

    async def delete_body(self, location: ObjectLocation) -> None:
        if not base.is_delivery(self._root, location):
            raise Forbidden("NotDelivery", f"not the body of a delivery: {location}")
        await in_thread(self._delete_one, location)

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
        # A file with a second name may be a hard link, made by an operator that can't read the file itself.
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
            # One byte more shows an object above the limit; a size looked up before could change.
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise TooLarge("ObjectTooLarge", f"more than {max_bytes} bytes: {location}")
        return content

    def _open(self, location: ObjectLocation) -> BinaryIO:
        return os.fdopen(self.open_descriptor(location), "rb")

    def open_descriptor(self, location: ObjectLocation) -> int:
        """For reading. Blocks, so it is called in a thread; the caller closes it."""
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
                # Before the rename: a power cut could leave an empty object under its name.
                os.fsync(file.fileno())
            os.replace(temporary, location.name, src_dir_fd=folder, dst_dir_fd=folder)
            # The file's own sync doesn't cover its name.
            os.fsync(folder)
        except BaseException:
            # After the rename there is nothing left to remove.
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            os.close(folder)

    def _make_parent(self, location: ObjectLocation) -> int:
        """An open descriptor of the folder that an object is put into; refuses a link under the object's name."""
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

    def _delete_one(self, location: ObjectLocation) -> None:
        with self._beneath(location) as (root, path):
            above, name = beneath.split(path)
            try:
                folder = beneath.open_folder(root, above)
            except FileNotFoundError:
                return
            try:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                # Also for one that wasn't there: the process that removed it may not have synced the folder yet.
                os.fsync(folder)
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
                # Removed since the listing.
                continue
            try:
                yield from _walk(inner, f"{below}/", depth + 1)
            finally:
                os.close(inner)
        elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(_TEMPORARY):
            with suppress(FileNotFoundError):
                yield below, os.stat(entry.name, dir_fd=folder, follow_symlinks=False).st_size


def _full_name_order(entry: os.DirEntry[str]) -> str:
    # In full names a folder has its slash: ``a-b`` comes before ``a/c``, though ``a`` comes before ``a-b``.
    return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name


class DirectoryUpload:
    """``root`` is the store's folder and still belongs to the store; ``open_folder`` opens the one that an object
    is put into, or refuses."""

    def __init__(self, root: int, temporary: str, open_folder: Callable[[ObjectLocation], int]) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._temporary = temporary
        self._open_folder = open_folder
        # The store may reopen its root meanwhile; the temporary file stays in the folder where it was made.
        self._root = os.dup(root)
        try:
            self._file: BinaryIO = os.fdopen(os.open(temporary, flags, 0o644, dir_fd=self._root), "w+b")
        except BaseException:
            os.close(self._root)
            raise

    @property
    def file(self) -> BinaryIO:
        return self._file

    async def write(self, piece: bytes) -> None:
        await in_thread(self._write, piece)

    async def keep(self, location: ObjectLocation) -> None:
        await in_thread(self._keep, location)

    async def discard(self) -> None:
        await in_thread(self._discard)

    def _write(self, piece: bytes) -> None:
        # A reader of ``file`` may have moved the position.
        self._file.seek(0, os.SEEK_END)
        self._file.write(piece)

    def _keep(self, location: ObjectLocation) -> None:
        self._file.flush()
        # Before the rename: a name must never show content that a power cut could lose.
        os.fsync(self._file.fileno())
        folder = self._open_folder(location)
        try:
            if not _is_there(folder, location.name, os.fstat(self._file.fileno()).st_size):
                os.replace(self._temporary, location.name, src_dir_fd=self._root, dst_dir_fd=folder)
            # Also for an object that was there: its writer may not have synced the name yet.
            os.fsync(folder)
        finally:
            os.close(folder)

    def _discard(self) -> None:
        if self._root < 0:
            return
        self._file.close()
        # A kept upload has no temporary name any more.
        with suppress(FileNotFoundError):
            os.unlink(self._temporary, dir_fd=self._root)
        os.close(self._root)
        self._root = -1


def _is_there(folder: int, name: str, size: int) -> bool:
    with suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size == size
    return False


async def in_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Raises ``Unavailable`` for errors of the disk."""
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        raise Unavailable("ObjectStoreUnavailable", f"the object store can't answer: {why}") from error
