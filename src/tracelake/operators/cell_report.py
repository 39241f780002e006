"""What comes back from executors: a few numbers and hashes for each cell of the grid, or why there are none.

A problem is part of the report and not an exception: Spark would try it again by itself, and tell it as a page of
Java. What it was on the executor, it is again on the driver, with its reason and whether trying again may help.
"""

from __future__ import annotations

import traceback

import msgspec

from tracelake.contracts.manifest import ManifestFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, TracelakeError, Unavailable

_MAX_DETAIL = 8000


class CellProblem(msgspec.Struct, frozen=True):
    """``detail`` is for the attempt's log: where in our own code something unforeseen happened."""

    reason: str
    message: str
    retryable: bool
    detail: str = ""

    @classmethod
    def of(cls, error: Exception, span: BlockRange, unforeseen: str) -> CellProblem:
        """``unforeseen`` is the reason where the error has none of its own."""
        if isinstance(error, TracelakeError):
            return cls(error.reason, error.message, not isinstance(error, Invalid))
        where = f"blocks {span.partition_key}: {type(error).__name__}: {error}"
        if isinstance(error, OSError):
            return cls("StorageFailed", where, True)
        return cls(unforeseen, where, True, traceback.format_exc()[-_MAX_DETAIL:])

    def error(self) -> TracelakeError:
        return (Unavailable if self.retryable else Invalid)(self.reason, self.message)


class CellReport(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a cell, by table. ``parent_hash`` is that of the first block, ``last_hash`` the hash of the last
    one; empty where the blocks aren't known. ``endpoints`` are those that delivered the blocks."""

    start: int
    end: int
    files: dict[str, ManifestFile] = {}
    parent_hash: str = ""
    last_hash: str = ""
    endpoints: list[str] = []
    problem: CellProblem | None = None
