"""An upload into a directory: a temporary file below the root, so on the same disk, that is renamed when complete.

What a crash leaves behind is a hidden file that no listing shows.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from tracelake.objects.disk import in_thread
from tracelake.objects.prefix import ObjectLocation


class DirectoryUpload:
    """``root`` is the store's folder and stays its owner's; ``open_folder`` opens the one that an object is put
    into, or refuses."""

    def __init__(self, root: int, temporary: str, open_folder: Callable[[ObjectLocation], int]) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._temporary = temporary
        self._open_folder = open_folder
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
        self._file.seek(0, os.SEEK_END)
        self._file.write(piece)

    def _keep(self, location: ObjectLocation) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        folder = self._open_folder(location)
        try:
            if not _is_there(folder, location.name, os.fstat(self._file.fileno()).st_size):
                os.replace(self._temporary, location.name, src_dir_fd=self._root, dst_dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)

    def _discard(self) -> None:
        if self._root < 0:
            return
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._temporary, dir_fd=self._root)
        os.close(self._root)
        self._root = -1


def _is_there(folder: int, name: str, size: int) -> bool:
    with suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size == size
    return False
