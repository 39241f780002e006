"""What went wrong in a query's process, in words for whoever asked: never a path, never a trace."""

from __future__ import annotations

import os
import re

import duckdb
import pyarrow as pa

from tracelake.domain.errors import TracelakeError
from tracelake.query.engine.messages import Failed

_LONGEST = 4000
_INVALID = 422
_DESCRIPTOR = re.compile(r"/proc/(?:self|\d+)/fd/\d+")
_OWN_NAME = re.compile(r"tracelake_\d+_(?:columns|mapped|rows_\d+)")
_SPILL = re.compile(r"(?:/[\w.-]+)+/duckdb_temp\S*")
_OUT_OF_MEMORY = "Out of Memory Error"
# Functions that allocate by themselves (``reservoir_quantile``) end in an internal error.
_UNALLOCATED = re.compile(r"INTERNAL Error: .*(?:allocation failure|bad[ _]alloc)", re.IGNORECASE)
_BROKEN = (duckdb.InternalException, duckdb.FatalException)


def failure(error: Exception) -> Failed:
    text = str(error)
    if isinstance(error, TracelakeError):
        return Failed(error.status, error.reason, scrub(error.message))
    if (
        isinstance(error, duckdb.OutOfMemoryException | MemoryError | pa.ArrowMemoryError)
        or _OUT_OF_MEMORY in text
        or (isinstance(error, _BROKEN) and _UNALLOCATED.match(text))
    ):
        return Failed(_INVALID, "QueryOutOfMemory", "the query needs more memory than one query may use")
    if isinstance(error, _BROKEN) or not isinstance(error, duckdb.Error | pa.ArrowException | OSError):
        return Failed(_INVALID, "QueryCrashed", "the query broke the engine; it was stopped")
    return Failed(_INVALID, "QueryFailed", scrub(text))


def scrub(text: str) -> str:
    for name in _files():
        text = text.replace(name, "(file)")
    text = _DESCRIPTOR.sub("(file)", text)
    text = _SPILL.sub("(spilled)", text)
    text = _OWN_NAME.sub("(rows)", text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _files() -> list[str]:
    """Where our descriptors really lead to, longest first."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("/") and not target.startswith("/dev/"):
            found.append(target)
    return sorted(found, key=len, reverse=True)
