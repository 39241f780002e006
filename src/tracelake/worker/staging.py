"""The folders that an attempt's Parquet goes to: made before the operator runs, taken over when it has finished.

The object root belongs to the platform; the operator may write in its own attempt's folders and nowhere else. A
place outside of the root, or one that a symbolic link leads to, is refused: it would be made with the wrapper's
rights. So every step is taken from a descriptor of the folder before, and none by a name that leads through
several.

Files that an attempt reports become the platform's before they are reported: from then on they are root's, or where
the wrapper isn't root, read-only. A file that has another name somewhere else, is no plain file, isn't the
attempt's, or is still open for writing is refused. So what the Dispatcher checks afterwards, presence, names and
sizes, can't change any more. What is in the files isn't looked at: their hashes are the operator's own word.

Object stores that aren't folders need nothing of this.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import stat
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tracelake.contracts.dispatcher_api import OutputIn, PayloadOutput
from tracelake.domain.errors import Conflict, Forbidden, Invalid
from tracelake.objects import beneath
from tracelake.objects.prefix import ObjectPrefix

_FILE = "file://"
_OPEN_MODE, _CLOSED_MODE, _SHARED_MODE, _FILE_MODE = 0o755, 0o700, 0o2770, 0o444
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ENTRIES = 50_000
_MAX_DEPTH = 16
_WRITER_SECONDS = 2.0
_LOOK_SECONDS = 0.02
_NO_LEASES = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EACCES, errno.EPERM)


def prepare_staging(
    root: Path, outputs: Iterable[PayloadOutput], owner: int | None, group: int | None = None
) -> list[str]:
    """The places that were made, named from the root. ``owner`` is the uid that the operator runs as, None when it
    is the wrapper's own; ``group`` are others who write there for it."""
    places = [
        _place(root, output.staging)
        for output in outputs
        if output.staging is not None and output.staging.startswith(_FILE)
    ]
    for place in places:
        folder = _make(root, place)
        try:
            if owner is not None:
                os.fchown(folder, owner, owner if group is None else group)
                os.fchmod(folder, _CLOSED_MODE if group is None else _SHARED_MODE)
            else:
                os.fchmod(folder, _CLOSED_MODE)
        finally:
            os.close(folder)
    return places


def take_over(
    root: Path, places: Iterable[str], outputs: Sequence[OutputIn], owners: Collection[int]
) -> None:
    """Everything in these places; ``owners`` are the uids that the attempt's files may have. Raises, with what is
    wrong, when something of it can't be the platform's."""
    reported = _Reported(root, outputs)
    count = 0
    for place in places:
        folder = _open(root, place)
        count = _take_folder(folder, place, reported, owners, count, 0)


def close_staging(root: Path, places: Iterable[str]) -> None:
    """Of an attempt that came to nothing: nobody looks into what it has left, until it is removed."""
    for place in places:
        with suppress(OSError):
            folder = _open(root, place)
            try:
                if os.geteuid() == 0:
                    os.fchown(folder, 0, 0)
                os.fchmod(folder, _CLOSED_MODE)
            finally:
                os.close(folder)


class _Reported:
    """Which of the files are going to be somebody's data."""

    def __init__(self, root: Path, outputs: Sequence[OutputIn]) -> None:
        self._files: set[str] = set()
        self._folders: list[str] = []
        for output in outputs:
            if output.manifest is not None:
                self._files |= {_reported(root, file.location) for file in output.manifest.files}
            elif output.location is not None:
                self._folders.append(_reported(root, output.location))

    def __contains__(self, path: str) -> bool:
        return path in self._files or any(
            path == folder or path.startswith(folder + "/") for folder in self._folders
        )


def _take_folder(
    folder: int, path: str, reported: _Reported, owners: Collection[int], count: int, depth: int
) -> int:
    """The folder first: then nobody can change what is in it. Closes ``folder``; returns how many were taken."""
    try:
        _take(folder, path, owners, _OPEN_MODE)
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MAX_ENTRIES - count + 1)]
        count += len(names)
        if count > _MAX_ENTRIES or depth > _MAX_DEPTH:
            raise Invalid("OutputTooManyFiles", f"more than {_MAX_ENTRIES} files and folders were staged")
        for name in names:
            below = f"{path}/{name}"
            kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISDIR(kind):
                inner = os.open(name, _FOLDER, dir_fd=folder)
                count = _take_folder(inner, below, reported, owners, count, depth + 1)
            elif stat.S_ISREG(kind):
                _take_file(folder, name, below, owners, proven=below in reported)
            else:
                raise Forbidden("OutputUnsafe", f"{below} is neither a file nor a folder")
        return count
    except FileNotFoundError:
        raise Conflict("OutputUnsafe", f"{path} changes while it is taken over") from None
    finally:
        os.close(folder)


def _take_file(folder: int, name: str, path: str, owners: Collection[int], *, proven: bool) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        _take(descriptor, path, owners, _FILE_MODE)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise Forbidden("OutputUnsafe", f"{path} is no plain file, or has a second name")
        if proven:
            match _is_open_for_writing(descriptor):
                case True:
                    raise Conflict("OutputUnsafe", f"{path} is still open for writing")
                case None:
                    _copy(folder, name, descriptor)
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: str, owners: Collection[int], mode: int) -> None:
    owner = os.fstat(descriptor).st_uid
    if owner not in owners and owner != os.geteuid():
        raise Forbidden("OutputUnsafe", f"{path} isn't the attempt's own: it belongs to uid {owner}")
    if os.geteuid() == 0:
        os.fchown(descriptor, 0, 0)
    os.fchmod(descriptor, mode)


def _is_open_for_writing(descriptor: int) -> bool | None:
    """By whomever, also by a mapping: a lease for reading isn't given then. None where there are no leases. Who has
    just closed it is waited for."""
    until = time.monotonic() + _WRITER_SECONDS
    while True:
        try:
            # Whoever opens it in this moment must not end us by the signal that this usually means.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            if error.errno in _NO_LEASES:
                return None
            if error.errno != errno.EAGAIN:
                raise
            if time.monotonic() > until:
                return True
            time.sleep(_LOOK_SECONDS)
            continue
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False


def _copy(folder: int, name: str, source: int) -> None:
    """Into a file that nobody has ever had open but us."""
    temporary = f".tmp-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    copy = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        offset = 0
        while sent := os.sendfile(copy, source, offset, 1 << 30):
            offset += sent
        os.fchmod(copy, _FILE_MODE)
        os.fsync(copy)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(copy)


def version_folders(root: Path, locations: Iterable[str]) -> list[str]:
    """The folders that hold these committed files, named from the root: those of their datasets' versions."""
    found: set[str] = set()
    for location in locations:
        if location.startswith(_FILE) and (below := _below(root, location)):
            parts = below.split("/")
            dataset = parts[0] == "dataset" and parts[2:3] == ["version"]
            folder = parts[:4] if dataset and len(parts) > 4 else parts[:-1]
            if folder:
                found.add("/".join(folder))
    return sorted(found)


def _reported(root: Path, location: str) -> str:
    """Named from the root. Whatever the Dispatcher would find by this location is what is looked at here: it may be
    a path as well as an address, and nothing that leads elsewhere."""
    uri = f"{_FILE}{location}" if location.startswith("/") else location
    top = ObjectPrefix.parse(f"{_FILE}{os.path.realpath(root)}")
    found = ObjectPrefix.parse(uri if uri.endswith("/") else f"{uri}/")
    if not top.contains(found) or found.path == top.path:
        raise Forbidden("OutputUnsafe", f"{location} doesn't lie below the objects")
    return found.path[len(top.path) :].rstrip("/")


def _below(root: Path, uri: str) -> str:
    """Named from the root; empty for what lies elsewhere."""
    prefix = f"{_FILE}{os.path.realpath(root)}/"
    return uri.removeprefix(prefix) if uri.startswith(prefix) else ""


def _place(root: Path, uri: str) -> str:
    top = ObjectPrefix.parse(f"{_FILE}{os.path.realpath(root)}")
    prefix = ObjectPrefix.parse(uri)
    if not top.contains(prefix) or prefix.path == top.path:
        raise Forbidden("LocationOutsideRoot", f"the staging folder {uri} isn't below {top}")
    return prefix.path[len(top.path) :].rstrip("/")


def _make(root: Path, place: str) -> int:
    held = beneath.HeldFolder(root)
    try:
        return beneath.make_folder(held.descriptor(), place, _OPEN_MODE, whatever_umask=True)
    except (beneath.LeadsElsewhere, NotADirectoryError):
        raise _not_a_folder(place) from None


def _open(root: Path, place: str) -> int:
    held = beneath.HeldFolder(root)
    try:
        return beneath.open_folder(held.descriptor(), place)
    except (beneath.LeadsElsewhere, NotADirectoryError):
        raise _not_a_folder(place) from None


def _not_a_folder(place: str) -> Forbidden:
    return Forbidden("LocationOutsideRoot", f"{place} isn't a folder below the objects")
