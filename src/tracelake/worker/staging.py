"""Files of one attempt: its view of the objects, its staging folders, and taking over what it wrote.

Before an attempt runs, its staging folders are made and shown to its process and to the Spark server that it
uses. Files of an input are shown when the operator asks for them. When the attempt has finished, its folders are
withdrawn from both and their files become the platform's; only then may they be reported. For root, file
ownership keeps operators out; otherwise mounts do, and an attempt that still has a file open for writing has
failed.

The object root belongs to the platform; an operator may write in its own attempt's folders only. A place outside
the root, or behind a symbolic link, is refused, since it would be made with the wrapper's rights. So each step
starts at a descriptor of the folder above, and no name has several parts.

Reported files become root's, or read-only if the wrapper isn't root. A file with a second name elsewhere, one
that isn't a plain file or not the attempt's, or one that is still open for writing is refused. So the presence,
names and sizes that the Dispatcher checks later can't change. The content isn't read: hashes are the operator's
own claim. Object stores that aren't folders need none of this.
"""

from __future__ import annotations

import asyncio
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

from tracelake.contracts.dispatcher_api import InputFile, OutputIn, PayloadOutput, TaskPayload
from tracelake.contracts.staging import version_folder
from tracelake.domain.errors import Conflict, Forbidden, Invalid, Unavailable
from tracelake.objects import beneath
from tracelake.objects.base import ObjectPrefix
from tracelake.worker.operator_session import AttemptProcess
from tracelake.worker.spark.engine import SparkEngine

_BUSY_SECONDS = 3.0
_BUSY_LOOK_SECONDS = 0.05
_FILE = "file://"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ENTRIES = 50_000
_MAX_DEPTH = 16
_WRITER_SECONDS = 2.0
_WRITER_LOOK_SECONDS = 0.02
_NO_LEASES = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EACCES, errno.EPERM)
_OPEN_MODE, _CLOSED_MODE, _SHARED_MODE, _FILE_MODE = 0o755, 0o700, 0o2770, 0o444


class AttemptObjects:
    def __init__(
        self, root: Path, task: TaskPayload, process: AttemptProcess, engine: SparkEngine | None
    ) -> None:
        self._root = root
        self._task = task
        self._process = process
        self._engine = engine
        self._places: list[str] = []
        self._seen: set[str] = set()

    async def prepare(self) -> None:
        """Make the staging folders and show them to the attempt, which may write there from now on."""
        if all(output.staging is None for output in self._task.outputs):
            return
        owner = self._process.owner
        group = None if self._engine is None or owner is None else self._engine.group
        self._places = await asyncio.to_thread(prepare_staging, self._root, self._task.outputs, owner, group)
        if self._places:
            await self._process.grant([], self._places)
            if self._engine is not None:
                await self._engine.grant(self._places)

    async def reveal(self, files: Sequence[InputFile]) -> None:
        """Show the folders of these files to the attempt, for reading."""
        folders = version_folders(self._root, (file.location for file in files))
        new = [folder for folder in folders if folder not in self._seen]
        if new:
            await self._process.grant(new, [])
            # Only now: a grant that failed is asked for again.
            self._seen.update(new)

    async def take_over(self, outputs: Sequence[OutputIn]) -> None:
        """Take over the reported files, so that the attempt can't change them; raises when it still could."""
        if not self._places:
            return
        await self._withdraw()
        owners = {
            each
            for each in (self._process.owner, None if self._engine is None else self._engine.group)
            if each is not None
        }
        places, self._places = self._places, []
        try:
            await asyncio.to_thread(take_over, self._root, places, outputs, owners)
        except BaseException:
            self._places = places
            raise

    async def close(self) -> None:
        """Hide the files that the attempt hasn't reported. Its process is gone by now, or sees none of them."""
        if not self._places:
            return
        if self._engine is not None:
            await _from(self._engine, self._places, force=True)
        await _from(self._process, self._places, force=True)
        await asyncio.to_thread(close_staging, self._root, self._places)

    async def _withdraw(self) -> None:
        """Withdraw the folders; without root, wait until no file there is open for writing. Spark tasks whose
        results were abandoned may take a moment to notice."""
        viewers: list[AttemptProcess | SparkEngine] = [self._process]
        if self._engine is not None:
            viewers.append(self._engine)
        alike = os.geteuid() != 0
        loop = asyncio.get_running_loop()
        until = loop.time() + _BUSY_SECONDS
        for viewer in viewers:
            while busy := await _from(viewer, self._places, force=not alike):
                if loop.time() > until:
                    raise Conflict("OutputUnsafe", f"something is still open for writing in {busy[0]}")
                await asyncio.sleep(_BUSY_LOOK_SECONDS)


async def _from(viewer: AttemptProcess | SparkEngine, places: Sequence[str], *, force: bool) -> list[str]:
    """Withdraw places from one viewer; one that is gone sees nothing anyway."""
    try:
        return await viewer.withdraw(places, force=force)
    except Unavailable:
        return []


def prepare_staging(
    root: Path, outputs: Iterable[PayloadOutput], owner: int | None, group: int | None = None
) -> list[str]:
    """Make the staging folders; the result are their names relative to the root. ``owner`` is the uid that the
    operator runs as, None for the wrapper's own; ``group`` are other accounts that write there for it."""
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
                # The set-group-ID bit gives new files this group, whichever account makes them.
                os.fchmod(folder, _CLOSED_MODE if group is None else _SHARED_MODE)
            else:
                os.fchmod(folder, _CLOSED_MODE)
        finally:
            os.close(folder)
    return places


def take_over(
    root: Path, places: Iterable[str], outputs: Sequence[OutputIn], owners: Collection[int]
) -> None:
    """Take over all files in these places; ``owners`` are the uids that they may have. Raises if one can't be
    taken over."""
    reported = _Reported(root, outputs)
    count = 0
    for place in places:
        folder = _open(root, place)
        count = _take_folder(folder, place, reported, owners, count, 0)


def close_staging(root: Path, places: Iterable[str]) -> None:
    """Make the folders of an attempt without a result inaccessible until they are removed."""
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
    """The files that the attempt reports as data."""

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
    """Take over a folder, itself first so that its entries can't change. Closes ``folder``; returns the number of
    files."""
    try:
        _take(folder, path, owners, _OPEN_MODE)
        with os.scandir(folder) as entries:
            # One more than allowed is enough to refuse.
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
    # O_NONBLOCK: a FIFO in the file's place must not block the wrapper.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        _take(descriptor, path, owners, _FILE_MODE)
        # Looked at after it was taken, so that the answer stays true.
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
    """Whether any process has the file open or mapped for writing: then the kernel refuses a read lease. None on
    a file system without leases. A process that has just closed it gets a moment."""
    until = time.monotonic() + _WRITER_SECONDS
    while True:
        try:
            # A process that opens the file at this moment makes the kernel send SIGIO, which would end this one.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            if error.errno in _NO_LEASES:
                return None
            if error.errno != errno.EAGAIN:
                raise
            if time.monotonic() > until:
                return True
            time.sleep(_WRITER_LOOK_SECONDS)
            continue
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False


def _copy(folder: int, name: str, source: int) -> None:
    """Copy into a new file, which no other process has ever had open."""
    temporary = f".tmp-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    copy = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        offset = 0
        while sent := os.sendfile(copy, source, offset, 1 << 30):
            offset += sent
        os.fchmod(copy, _FILE_MODE)
        # On disk before the name leads to it.
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
    """The folders of the dataset versions that hold these committed files, relative to the root."""
    found: set[str] = set()
    for location in locations:
        if location.startswith(_FILE) and (below := _below(root, location)):
            found.add(version_folder(below))
    # A file at the root itself has no folder.
    return sorted(found - {""})


def _reported(root: Path, location: str) -> str:
    """The reported file, relative to the root. A location may be a path or a URI; it is resolved as the
    Dispatcher does, and may not lead elsewhere."""
    uri = f"{_FILE}{location}" if location.startswith("/") else location
    top = ObjectPrefix.parse(f"{_FILE}{os.path.realpath(root)}")
    found = ObjectPrefix.parse(uri if uri.endswith("/") else f"{uri}/")
    if not top.contains(found) or found.path == top.path:
        raise Forbidden("OutputUnsafe", f"{location} doesn't lie below the objects")
    return found.path[len(top.path) :].rstrip("/")


def _below(root: Path, uri: str) -> str:
    """The place relative to the root; empty if it lies elsewhere."""
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
