"""Removes and lists folder trees that untrusted code has written, whatever their shape.

An operator, a Spark task or a function may leave thousands of nested folders, millions of files in one, names of
255 bytes, paths that are longer than the kernel accepts, and folders that their own owner can't enter. Recursion
fails at the first, collecting names at the second. So ``remove_tree`` never goes deeper than one folder below the
top: it moves a folder that isn't empty up to the top, under a new name, and empties it there. It holds a handful
of descriptors, follows no link and never uses ``..``, which could be moved meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH = 4096
_PREFIX = ".removed-"

_log = logging.getLogger(__name__)


def remove_tree(path: str | Path, *, dir_fd: int | None = None) -> int:
    """Remove a tree; the result is its number of files. A link is removed and not followed.

    Entries that can't be removed stay, everything else goes; then the first error is raised.
    ``FileNotFoundError`` when there is nothing.
    """
    name = os.fspath(path)
    if not stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=dir_fd)
        return 1
    top = _open(name, dir_fd)
    try:
        removal = _Removal(top)
        removal.run()
    finally:
        os.close(top)
    if removal.problem is not None:
        raise removal.problem
    os.rmdir(name, dir_fd=dir_fd)
    return removal.files


def remove_if_possible(path: str | Path) -> bool:
    """Remove a tree in a sweep: errors are logged and don't stop the caller."""
    try:
        remove_tree(path)
    except FileNotFoundError:
        return True
    except Exception as error:
        _log.warning("can't remove %s: %s", path, error)
        return False
    return True


def folders_of(path: str | Path, spared: Collection[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Each folder of a tree, outer ones first, with the names of its entries that aren't folders.

    Links aren't followed. Folders that can't be listed, also because their path is too long, are skipped, as are
    the folders ``spared``, by their true paths.
    """
    waiting = [os.fspath(path)]
    while waiting:
        folder = waiting.pop()
        names: list[str] = []
        below: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    (below if entry.is_dir(follow_symlinks=False) else names).append(entry.name)
        except OSError:
            continue
        yield folder, names
        paths = (os.path.join(folder, name) for name in below)
        waiting += [path for path in paths if not spared or os.path.realpath(path) not in spared]


class _Removal:
    def __init__(self, top: int) -> None:
        self._top = top
        self._moved = 0
        self.files = 0
        self.problem: OSError | None = None

    def run(self) -> None:
        """Empty the folders at the top one by one; folders inside them are moved to the top."""
        stuck: set[str] = set()
        while names := _some_names(self._top, stuck):
            for name in names:
                if not self._remove(self._top, name) and not self._empty(name):
                    stuck.add(name)

    def _empty(self, name: str) -> bool:
        """Empty a folder; True when it is gone."""
        try:
            folder = _open(name, self._top)
        except OSError as error:
            return self._failed(error)
        stuck: set[str] = set()
        try:
            while names := _some_names(folder, stuck):
                for inner in names:
                    if not self._remove(folder, inner) and not self._lift(folder, inner):
                        stuck.add(inner)
        except OSError as error:
            return self._failed(error)
        finally:
            os.close(folder)
        return not stuck and self._remove(self._top, name, last=True)

    def _remove(self, folder: int, name: str, *, last: bool = False) -> bool:
        """Remove a file or an empty folder. False for a folder that isn't empty, and for an entry that can't be
        removed."""
        try:
            os.unlink(name, dir_fd=folder)
            self.files += 1
            return True
        except FileNotFoundError:
            return True
        except OSError as error:
            # Linux reports a folder, POSIX a missing permission.
            if error.errno not in (errno.EISDIR, errno.EPERM):
                return self._failed(error)
        try:
            os.rmdir(name, dir_fd=folder)
            return True
        except FileNotFoundError:
            return True
        except OSError as error:
            if last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                return self._failed(error)
            return False

    def _lift(self, folder: int, name: str) -> bool:
        while True:
            self._moved += 1
            target = f"{_PREFIX}{self._moved}"
            try:
                # A folder replaces at most an empty folder, and nothing else.
                os.rename(name, target, src_dir_fd=folder, dst_dir_fd=self._top)
                return True
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    continue
                if error.errno == errno.EACCES and self._opened_up(folder, name):
                    continue
                return error.errno == errno.ENOENT or self._failed(error)

    def _opened_up(self, folder: int, name: str) -> bool:
        """Make a folder writable: moving it changes its ``..`` entry. False if it already was."""
        try:
            return _let_in(name, folder)
        except OSError:
            return False

    def _failed(self, error: OSError) -> bool:
        self.problem = self.problem or error
        return False


def _some_names(folder: int, stuck: set[str]) -> list[str]:
    """Read from the beginning each time: removals may have moved the other entries."""
    with os.scandir(folder) as entries:
        return list(islice((entry.name for entry in entries if entry.name not in stuck), _BATCH))


def _open(name: str, dir_fd: int | None) -> int:
    try:
        folder = os.open(name, _FOLDER, dir_fd=dir_fd)
    except PermissionError:
        if not _let_in(name, dir_fd):
            raise
        folder = os.open(name, _FOLDER, dir_fd=dir_fd)
    # Closed before it is listed, so that no process adds to it while it is being emptied.
    with suppress(PermissionError):
        if os.geteuid() == 0:
            os.fchown(folder, 0, 0)
        os.fchmod(folder, 0o700)
    return folder


def _let_in(name: str, dir_fd: int | None) -> bool:
    """Give the owner access, whatever the mode is. False when the mode is no obstacle."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if stat.S_IMODE(os.fstat(found).st_mode) & 0o700 == 0o700:
            return False
        # By the descriptor, since a name could have become a link; through ``/proc``, since ``fchmod`` refuses
        # ``O_PATH``.
        os.chmod(f"/proc/self/fd/{found}", 0o700)
        return True
    finally:
        os.close(found)
