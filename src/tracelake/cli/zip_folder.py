"""A folder as a bundle: the same files give the same bytes, so the same bundle.

Entries stand in the order of their names, with one date for all and only the executable bit of their modes. What
interpreters and tools leave behind (``__pycache__``, ``.git``) isn't part of a function. A link is packed as the
file that it leads to, as long as that is inside of the folder.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tracelake.domain.errors import Invalid

LEFT_OUT = frozenset(
    {"__pycache__", ".git", ".hg", ".svn", ".DS_Store", ".mypy_cache", ".pytest_cache", ".venv"}
)
_DATE = (1980, 1, 1, 0, 0, 0)
_UNIX = 3


def zip_folder(folder: Path, into: BinaryIO) -> None:
    """Raises ``Invalid`` for what a bundle can't hold, ``OSError`` for what can't be read."""
    root = folder.resolve()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in sorted(_files(root, "", (root,))):
            entry = zipfile.ZipInfo(name, _DATE)
            executable = path.stat().st_mode & stat.S_IXUSR
            entry.create_system = _UNIX
            entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())


def _files(folder: Path, below: str, inside: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """``inside`` are the folders on the way down: a link back to one of them would never end."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = below + entry.name
            if entry.name in LEFT_OUT or entry.name.endswith(".pyc"):
                continue
            path = Path(entry.path).resolve()
            if not path.is_relative_to(inside[0]) or path in inside:
                raise Invalid(
                    "InvalidBundle", f"{name} is a link that leads out of the folder, or around in it"
                )
            if path.is_dir():
                yield from _files(path, f"{name}/", (*inside, path))
            elif path.is_file():
                yield name, path
            else:
                raise Invalid("InvalidBundle", f"{name} is neither a file nor a folder")
