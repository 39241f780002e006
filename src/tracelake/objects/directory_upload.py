"""An upload into a directory: a temporary file below the root, so on the same disk, that is renamed when complete.

What a crash leaves behind is a hidden file that no listing shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tracelake.objects.disk import in_thread, sync_folder
from tracelake.objects.prefix import ObjectLocation


class DirectoryUpload:
    """``locate`` turns a name into its path, or refuses it."""

    def __init__(self, temporary: Path, locate: Callable[[ObjectLocation], Path]) -> None:
        self._temporary = temporary
        self._locate = locate
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._file: BinaryIO = os.fdopen(descriptor, "w+b")

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
        path = self._locate(location)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.stat().st_size != os.fstat(self._file.fileno()).st_size:
            os.replace(self._temporary, path)
        sync_folder(path.parent)

    def _discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
