"""Writes small files that survive a crash: whole, for their owner alone, and under their name only when complete.

The content is synced before the file gets its name, since a power cut could otherwise leave an empty file under it;
then the folder is synced, since a file's own sync doesn't cover its name. ``replace_private`` renames, so a reader
sees the old content or the new one. ``create_private`` links, which fails when the name is taken: of several
processes that start at once exactly one creates the file, and the others adopt it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_private(path: Path, content: bytes, *, owner: tuple[int, int] | None = None) -> None:
    """Create the file or replace it; a link under its name is replaced, not followed. ``owner`` is the uid and the
    gid that root gives it to."""
    temporary = _written_beside(path, content, owner)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def create_private(path: Path, content: bytes) -> bool:
    """Create the file whole, or return False because another process did."""
    temporary = _written_beside(path, content, None)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        # After the link it is only a second name of the file.
        temporary.unlink()
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make names in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written_beside(path: Path, content: bytes, owner: tuple[int, int] | None) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if owner is not None:
                os.fchown(file.fileno(), *owner)
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
