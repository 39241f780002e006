"""Bundles of functions: which zip files are accepted, and how their entrypoint is found.

Every reader must understand a bundle the same way, and unpacking it must stay inside of its folder and within
bounds. Only the directory is checked, before anything is unpacked, by the Dispatcher when a bundle is pushed and by
the invoker before it unpacks one. Two readers of one zip must not see two archives, so unneeded features are
refused rather than interpreted: bytes before or between the entries, ZIP64, encryption, entries that share their
bytes, a name that differs between the directory and the entry. Declared sizes limit what an unpacker writes; it
must stop an entry at its declared size (``zipfile`` does). Of the modes only the executable bit counts: the
unpacker sets the modes of files and folders.

Entrypoints are named as in AWS Lambda. An executable ``bootstrap`` at the root runs by itself and interprets the
entrypoint freely; otherwise ``module.function`` names a Python module (``module.py`` or a package) or a Node one
(``module.js``, ``.mjs``, ``.cjs``). Dots and slashes both lead into folders.
"""

from __future__ import annotations

import re
import stat
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, Literal

from tracelake.domain.errors import Invalid

MAX_BUNDLE_BYTES = 64 * 1024 * 1024
MAX_UNPACKED_BYTES = 250 * 1024 * 1024
MAX_ENTRIES = 10_000
MAX_RATIO = 100
MAX_NAME_BYTES = 512
#: The compression ratio isn't checked below this size.
_SMALL = 1024 * 1024
_MAX_DIRECTORY_BYTES = 4 * 1024 * 1024
#: Structures of the zip format: the end of the directory, the ZIP64 locator before it, and an entry's header.
_END = struct.Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_LOCATOR_MAGIC = b"PK\x06\x07"
_LOCATOR_BYTES = 20
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_PLAIN_MODES = (0, stat.S_IFREG, stat.S_IFDIR)
_DRIVE = re.compile(r"[A-Za-z]:")
BundleKind = Literal["python", "node", "bootstrap"]
BOOTSTRAP = "bootstrap"
#: A DAG names a bundle by the hash of the zip file.
REFERENCE = re.compile(r"^sha256:[0-9a-f]{64}\Z")
_ENTRYPOINT = re.compile(r"[A-Za-z0-9_-]+([./][A-Za-z0-9_-]+)*\.[A-Za-z_$][A-Za-z0-9_$]*", re.ASCII)
_SUFFIXES: tuple[tuple[str, BundleKind], ...] = (
    (".py", "python"),
    ("/__init__.py", "python"),
    (".js", "node"),
    (".mjs", "node"),
    (".cjs", "node"),
)


@dataclass(frozen=True, slots=True)
class BundleListing:
    """The files of a bundle by name, and which of them are executable."""

    names: tuple[str, ...]
    executables: frozenset[str]
    unpacked_bytes: int


def check_zip(file: BinaryIO) -> BundleListing:
    """The bundle's listing. Raises ``Invalid`` with the reason ``InvalidBundle``. Moves the file's position."""
    directory = _directory_start(file)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error, ValueError) as error:
        raise _invalid(f"the zip's directory can't be read: {error}") from None
    if len(entries) > MAX_ENTRIES:
        raise _invalid(f"more than {MAX_ENTRIES:,} entries")
    for entry in entries:
        _check_entry(entry)
    _check_names(entries)
    _check_places(file, entries, directory)
    files = [entry for entry in entries if not entry.is_dir()]
    if not files:
        raise _invalid("there is no file in it")
    unpacked = sum(entry.file_size for entry in files)
    _check_size(unpacked, sum(entry.compress_size for entry in files))
    return BundleListing(
        tuple(sorted(entry.filename for entry in files)),
        # The upper half of the attributes is the Unix mode.
        frozenset(entry.filename for entry in files if entry.external_attr >> 16 & stat.S_IXUSR),
        unpacked,
    )


def _directory_start(file: BinaryIO) -> int:
    """The directory's offset. Its size is checked here, before ``zipfile`` builds an object per entry."""
    size = file.seek(0, 2)
    # A comment of up to 64 KiB may follow the end record.
    tail_start = max(0, size - _END.size - 0xFFFF)
    file.seek(tail_start)
    tail = file.read()
    at = tail.rfind(_END_MAGIC)
    if at < 0 or len(tail) - at < _END.size:
        raise _invalid("it is not a zip file")
    _, disk, first_disk, here, entries, length, start, comment = _END.unpack_from(tail, at)
    end = tail_start + at
    # Readers search for the end in different ways: with bytes behind it, two of them may find two zips.
    if len(tail) - at - _END.size != comment:
        raise _invalid("there are bytes after the end of the zip")
    if disk or first_disk or here != entries:
        raise _invalid("it is a part of a split zip")
    if tail[max(0, at - _LOCATOR_BYTES) :].startswith(_LOCATOR_MAGIC) or 0xFFFFFFFF in (length, start):
        raise _invalid("it is a ZIP64 archive, which a bundle is too small to need")
    if start + length != end:
        raise _invalid("its directory isn't at the recorded offset")
    if entries > MAX_ENTRIES or length > _MAX_DIRECTORY_BYTES:
        raise _invalid(f"more than {MAX_ENTRIES:,} entries, or very long names")
    return int(start)


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name = entry.filename
    # ``zipfile`` cuts names at a NUL, so two names could become one.
    if name != entry.orig_filename or not name.isprintable() or "\\" in name:
        raise _invalid(f"a forbidden character in the name {entry.orig_filename[:200]!r}")
    parts = name.removesuffix("/").split("/")
    if _DRIVE.match(name) or any(part in ("", ".", "..") for part in parts):
        raise _invalid(f"a name that leads out of the bundle: {name[:200]!r}")
    if len(name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > 255 for part in parts):
        raise _invalid(f"a name that is too long: {name[:200]!r}")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in _PLAIN_MODES or (kind and stat.S_ISDIR(kind) != entry.is_dir()):
        raise _invalid(f"neither a file nor a folder (a link or a device): {name[:200]!r}")
    if entry.flag_bits & _ENCRYPTED:
        raise _invalid(f"encrypted: {name[:200]!r}")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _invalid(f"neither stored nor deflated: {name[:200]!r}")
    if entry.is_dir() and entry.file_size:
        raise _invalid(f"a folder with content: {name[:200]!r}")


def _check_names(entries: Sequence[zipfile.ZipInfo]) -> None:
    """No name occurs twice, and none is both a file and a folder."""
    files = {entry.filename for entry in entries if not entry.is_dir()}
    if len({entry.filename for entry in entries}) != len(entries):
        raise _invalid("a name occurs twice")
    for name in (entry.filename for entry in entries):
        for folder in _parents(name):
            if folder in files:
                raise _invalid(f"both a file and a folder: {folder[:200]!r}")


def _parents(name: str) -> Iterable[str]:
    at = name.find("/")
    while at >= 0:
        yield name[:at]
        at = name.find("/", at + 1)


def _check_places(file: BinaryIO, entries: Sequence[zipfile.ZipInfo], directory: int) -> None:
    """Each entry has its own bytes between the file's start and its directory, under the same name."""
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    starts = [*(entry.header_offset for entry in ordered), directory]
    if starts[0] != 0:
        raise _invalid("there are bytes before its first entry")
    for entry, (start, following) in zip(ordered, pairwise(starts), strict=True):
        file.seek(start)
        header = file.read(_LOCAL.size)
        if len(header) < _LOCAL.size or header[:4] != _LOCAL_MAGIC:
            raise _invalid(f"no entry at the offset in the directory: {entry.filename[:200]!r}")
        fields = _LOCAL.unpack(header)
        flags, method, name_length, extra_length = fields[2], fields[3], fields[9], fields[10]
        name = file.read(name_length)
        # Bit 11 marks a name in UTF-8; without it, zip means code page 437.
        encoding = "utf-8" if flags & 0x800 else "cp437"
        if name.decode(encoding, "replace") != entry.filename or (flags, method) != (
            entry.flag_bits,
            entry.compress_type,
        ):
            raise _invalid(f"its header differs from the directory: {entry.filename[:200]!r}")
        if start + _LOCAL.size + name_length + extra_length + entry.compress_size > following:
            raise _invalid(f"shares its bytes with another entry: {entry.filename[:200]!r}")


def _check_size(unpacked: int, packed: int) -> None:
    if unpacked > MAX_UNPACKED_BYTES:
        raise _invalid(f"more than {MAX_UNPACKED_BYTES // _SMALL} MiB unpacked")
    if unpacked > _SMALL and unpacked > MAX_RATIO * packed:
        raise _invalid(f"it would unpack to more than {MAX_RATIO} times its size")


def _invalid(why: str) -> Invalid:
    return Invalid("InvalidBundle", f"not a bundle: {why}")


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """``file`` is the module's file in the bundle, or the ``bootstrap``; ``function`` is the function to call."""

    kind: BundleKind
    file: str
    function: str


def find_entrypoint(listing: BundleListing, entrypoint: str) -> Entrypoint:
    """Raises ``Invalid`` with the reason ``InvalidEntrypoint`` when the bundle has no such module, or two."""
    if BOOTSTRAP in listing.executables:
        return Entrypoint("bootstrap", BOOTSTRAP, entrypoint)
    if _ENTRYPOINT.fullmatch(entrypoint) is None:
        raise _invalid_entrypoint(f"{entrypoint[:200]!r} is not of the form module.function")
    module, _, function = entrypoint.rpartition(".")
    stem = module.replace(".", "/")
    names = frozenset(listing.names)
    found = [
        Entrypoint(kind, stem + suffix, function) for suffix, kind in _SUFFIXES if stem + suffix in names
    ]
    if len(found) > 1:
        raise _invalid_entrypoint(f"{module} could be any of {', '.join(each.file for each in found)}")
    if not found:
        unmarked = "; its bootstrap is not executable" if BOOTSTRAP in names else ""
        raise _invalid_entrypoint(
            f"the bundle has neither {stem}.py, {stem}/__init__.py nor {stem}.js, .mjs or .cjs{unmarked}"
        )
    return found[0]


def _invalid_entrypoint(why: str) -> Invalid:
    return Invalid("InvalidEntrypoint", why)
