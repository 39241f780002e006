"""Checks that a reported output is there, before the transaction that points readers at it.

It finds the errors of a mistaken or superseded writer: each file exists, below the staging prefix of exactly this
attempt, with the reported size, named after a block range inside the output's, without two files for one block, and
the totals agree. None of it can change afterwards: only workers report files, and they take ownership of the files
before. Contents aren't read: the operator computed the hashes while writing and is trusted with its own rows, and
reading every byte again would make the Dispatcher, which moves no data, the bottleneck. A crash between
writing and reporting breaks presence and size; ``integrity_check`` re-reads stored rows.

Reasons, all 422: ``OutputOutsideStaging``, ``OutputMissing``, ``OutputSizeMismatch``,
``OutputNameInvalid``, ``OutputRangeInvalid``, ``OutputTooManyFiles``, ``ManifestMismatch``.
"""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise

from tracelake.contracts.manifest import MAX_FILES, Manifest, ManifestFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Forbidden, Invalid
from tracelake.objects.base import ObjectLocation, ObjectPrefix, ObjectStat, ObjectStore

CONCURRENCY = 16

_FILE_NAME = re.compile(r"(?P<name>.+)_(?P<start>[0-9]{1,19})_(?P<end>[0-9]{1,19})\.parquet", re.ASCII)


async def verify_output(
    store: ObjectStore,
    staging: ObjectPrefix,
    location: str,
    manifest: Manifest | None,
    row_count: int | None,
    start: int | None = None,
    end: int | None = None,
    *,
    name: str | None = None,
) -> tuple[ObjectStat, ...]:
    """Raise ``Invalid``, or return the files to commit. ``name`` is the output's, for its file names."""
    place = _inside(store, staging, location)
    span = _span(start, end)
    try:
        if manifest is None:
            return await _verify_unlisted(store, place, row_count, span, name)
        return await _verify_listed(store, staging, place, manifest, row_count, span, name)
    except Forbidden as error:
        raise Invalid("OutputOutsideStaging", error.message) from None


async def _verify_unlisted(
    store: ObjectStore,
    place: ObjectLocation | ObjectPrefix,
    row_count: int | None,
    span: BlockRange | None,
    name: str | None,
) -> tuple[ObjectStat, ...]:
    if isinstance(place, ObjectLocation):
        single = await store.stat(place)
        if single is not None:
            _named_range(place, span, name)
            return (single,)
        # A folder may be named without its final slash.
        place = ObjectPrefix(place.scheme, place.bucket, place.path + "/")
    below = await store.list(place, MAX_FILES + 1)
    if len(below) > MAX_FILES:
        raise Invalid("OutputTooManyFiles", f"more than {MAX_FILES} files below {place}")
    # Writers leave markers such as _SUCCESS beside the data.
    found = tuple(file for file in below if not file.location.name.startswith((".", "_")))
    # An output without rows needs no file.
    if not found and row_count != 0:
        raise Invalid("OutputMissing", f"nothing was written to {place}")
    _refuse_overlaps([_named_range(file.location, span, name) for file in found])
    return found


async def _verify_listed(
    store: ObjectStore,
    staging: ObjectPrefix,
    place: ObjectLocation | ObjectPrefix,
    manifest: Manifest,
    row_count: int | None,
    span: BlockRange | None,
    name: str | None,
) -> tuple[ObjectStat, ...]:
    if row_count is not None and manifest.row_count != row_count:
        raise _mismatch(f"its files have {manifest.row_count} rows, the output {row_count}")
    listed = [(_listed_location(store, staging, place, file), file) for file in manifest.files]
    if len({location for location, _ in listed}) != len(listed):
        raise _mismatch("a file is listed twice")
    ranges = [_named_range(location, span, name) for location, _ in listed]
    _refuse_overlaps(ranges)
    for (_, file), named in zip(listed, ranges, strict=True):
        _check_blocks(file, named)
    found: list[ObjectStat] = []
    for first in range(0, len(listed), CONCURRENCY):
        batch = listed[first : first + CONCURRENCY]
        # In batches: each look may take a thread or a connection.
        stats = await asyncio.gather(*(store.stat(location) for location, _ in batch))
        found.extend(
            _present(location, file, stat) for (location, file), stat in zip(batch, stats, strict=True)
        )
    return tuple(found)


def _present(location: ObjectLocation, file: ManifestFile, stat: ObjectStat | None) -> ObjectStat:
    if stat is None:
        raise Invalid("OutputMissing", f"reported but not there: {location}")
    if stat.bytes != file.bytes:
        raise Invalid("OutputSizeMismatch", f"{location} has {stat.bytes} bytes, {file.bytes} were reported")
    return stat


def _inside(store: ObjectStore, staging: ObjectPrefix, text: str) -> ObjectLocation | ObjectPrefix:
    try:
        place = store.locate(text)
    except Invalid as error:
        raise Invalid("OutputOutsideStaging", error.message) from None
    as_prefix = isinstance(place, ObjectLocation) and place.uri + "/" == staging.uri
    if not (as_prefix or staging.contains(place)):
        raise Invalid("OutputOutsideStaging", f"{place} is not below {staging}")
    return place


def _listed_location(
    store: ObjectStore,
    staging: ObjectPrefix,
    place: ObjectLocation | ObjectPrefix,
    file: ManifestFile,
) -> ObjectLocation:
    location = _inside(store, staging, file.location)
    if isinstance(location, ObjectPrefix):
        raise _mismatch(f"a folder is listed: {location}")
    # With the slash, or ``rows2/a`` would be part of ``rows``.
    if location != place and not location.uri.startswith(place.uri.removesuffix("/") + "/"):
        raise _mismatch(f"{location} is not part of {place}")
    return location


def _span(start: int | None, end: int | None) -> BlockRange | None:
    if start is None and end is None:
        return None
    try:
        if start is None or end is None:
            raise ValueError("start and end come together")
        return BlockRange(start, end)
    except ValueError as error:
        raise Invalid("OutputRangeInvalid", str(error)) from None


def _named_range(location: ObjectLocation, span: BlockRange | None, name: str | None) -> BlockRange | None:
    """The range in the file's name, which an output with a range must have."""
    if span is None:
        return None
    matched = _FILE_NAME.fullmatch(location.name)
    if matched is None or (name is not None and matched["name"] != name):
        raise Invalid(
            "OutputNameInvalid", f"not named {name or '{name}'}_{{start}}_{{end}}.parquet: {location}"
        )
    try:
        named = BlockRange(int(matched["start"]), int(matched["end"]))
    except ValueError:
        raise Invalid("OutputNameInvalid", f"no block range in the name: {location}") from None
    if not span.covers(named):
        raise Invalid("OutputRangeInvalid", f"{location} lies outside of {span.partition_key}")
    return named


def _refuse_overlaps(ranges: list[BlockRange | None]) -> None:
    """Two files for one block are a retried part reported twice: its rows would be there twice."""
    ordered = sorted(named for named in ranges if named is not None)
    for one, other in pairwise(ordered):
        if one.overlaps(other):
            raise _mismatch(f"two files for blocks {one.partition_key} and {other.partition_key}")


def _check_blocks(file: ManifestFile, named: BlockRange | None) -> None:
    if named is None or file.min_block is None or file.max_block is None:
        return
    if not (named.start <= file.min_block and file.max_block <= named.end):
        raise _mismatch(f"blocks {file.min_block}-{file.max_block} in a file named {named.partition_key}")


def _mismatch(why: str) -> Invalid:
    return Invalid("ManifestMismatch", f"the manifest doesn't hold: {why}")
