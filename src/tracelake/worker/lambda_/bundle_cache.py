"""Bundles on the invoker's disk: fetched once, verified before each run, unpacked anew for each environment.

A bundle's name is the SHA-256 of its zip file, so only the content counts. The hash is computed when the zip
arrives and again before it is unpacked. A warm environment no longer reads the zip, so for it the hash is
computed again only if the file was touched since. A zip that no longer matches is deleted and fetched again.
Bundles are unpacked into a new, private folder, up to the limits that ``check_zip`` has found declared.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from tracelake.domain.bundles import MAX_BUNDLE_BYTES, BundleListing, check_zip
from tracelake.domain.errors import Invalid
from tracelake.worker.lambda_.function_program import open_to_readers

MAX_CACHED_BYTES = 1024 * 1024 * 1024

FetchBundle = Callable[[str], AsyncIterator[bytes]]
_Mark = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class VerifiedBundle:
    """An open zip file whose content was just found to have the hash. Unpacking reads this file and not the name,
    which may lead elsewhere by then."""

    sha256: str
    file: BinaryIO
    listing: BundleListing

    def unpack(self, folder: Path) -> None:
        """Unpack into ``folder``, which must not exist. All users may read the files, none may change them."""
        folder.mkdir()
        self.file.seek(0)
        try:
            with zipfile.ZipFile(self.file) as archive:
                for entry in archive.infolist():
                    _unpack_entry(archive, entry, folder, entry.filename in self.listing.executables)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
            raise Invalid("InvalidBundle", f"not a bundle: it can't be unpacked: {error}") from None
        open_to_readers(folder)

    def close(self) -> None:
        self.file.close()


def _unpack_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, root: Path, executable: bool) -> None:
    target = root / entry.filename
    if entry.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # O_EXCL: a second entry of the same name, or a name that is a link, is refused.
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out, archive.open(entry) as content:
        shutil.copyfileobj(content, out)
        os.fchmod(descriptor, 0o555 if executable else 0o444)


class BundleCache:
    def __init__(self, folder: Path, fetch: FetchBundle) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._fetch = fetch
        self._seen: dict[str, _Mark] = {}
        self._arriving: dict[str, asyncio.Lock] = {}
        # Downloads that a killed invoker has left.
        for leftover in folder.glob(".*"):
            leftover.unlink()

    async def open(self, sha256: str) -> VerifiedBundle:
        """Hash the zip and open it. Raises ``Invalid`` when the bytes are no bundle, or have another hash."""
        # Those that ask for the same bundle share one download.
        async with self._arriving.setdefault(sha256, asyncio.Lock()):
            found = await self._hashed(sha256)
            if found is None:
                await self._arrive(sha256)
                found = await self._hashed(sha256)
            if found is None:
                raise Invalid("BundleMismatch", f"the bundle's content doesn't match sha256:{sha256}")
            return found

    async def _hashed(self, sha256: str) -> VerifiedBundle | None:
        """Hash in a thread, which goes on when the caller stops waiting; the file is then closed."""
        hashing = asyncio.ensure_future(asyncio.to_thread(self._open_cached, sha256))
        try:
            return await asyncio.shield(hashing)
        except asyncio.CancelledError:
            hashing.add_done_callback(_close_unused)
            raise

    async def touched(self, sha256: str) -> bool:
        """Whether the zip has changed, or gone, since it was verified."""
        return self._seen.get(sha256) != _mark(self._path(sha256))

    def _path(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.zip"

    def _open_cached(self, sha256: str) -> VerifiedBundle | None:
        path = self._path(sha256)
        try:
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        except FileNotFoundError:
            return None
        try:
            # Before hashing: a change meanwhile then shows as one.
            mark = _marked(os.fstat(file.fileno()))
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                bundle = VerifiedBundle(sha256, file, check_zip(file))
                self._seen[sha256] = mark
                return bundle
        except BaseException:
            file.close()
            raise
        file.close()
        path.unlink(missing_ok=True)
        return None

    async def _arrive(self, sha256: str) -> None:
        temporary = self._folder / f".{uuid4().hex}"
        size = 0
        try:
            with temporary.open("xb") as out:
                os.fchmod(out.fileno(), 0o600)
                async for part in self._fetch(sha256):
                    size += len(part)
                    if size > MAX_BUNDLE_BYTES:
                        raise Invalid(
                            "InvalidBundle", f"the bundle is larger than {MAX_BUNDLE_BYTES >> 20} MiB"
                        )
                    out.write(part)
            os.replace(temporary, self._path(sha256))
        finally:
            temporary.unlink(missing_ok=True)
        self._make_room(sha256)

    def _make_room(self, kept: str) -> None:
        """Delete the zips that were fetched longest ago; they can be fetched again."""
        files = sorted(self._folder.glob("*.zip"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        total = 0
        for path in files:
            total += path.stat().st_size
            if total > MAX_CACHED_BYTES and path.stem != kept:
                path.unlink(missing_ok=True)
                self._seen.pop(path.stem, None)


def _mark(path: Path) -> _Mark | None:
    try:
        return _marked(os.lstat(path))
    except FileNotFoundError:
        return None


def _marked(found: os.stat_result) -> _Mark:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _close_unused(hashing: asyncio.Future[VerifiedBundle | None]) -> None:
    if not hashing.cancelled() and hashing.exception() is None and (bundle := hashing.result()) is not None:
        bundle.file.close()
