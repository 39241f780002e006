"""The manifest of a Parquet output: exactly the files that a completion reports.

Readers are given these files and never list a directory, so a file that isn't here doesn't exist, whatever a
crashed or superseded writer left beside it. Unknown fields are refused: a misspelt field would otherwise be a
promise that is never checked.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.where_bounds import ColumnBounds

MAX_FILES = 10_000
MAX_ENDPOINTS = 1000
MAX_BOUNDS = 100
MAX_BOUND_CHARS = 64

Location = Annotated[str, Meta(min_length=1, max_length=2048)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Block = Annotated[int, Meta(ge=0, le=MAX_BLOCK)]
EndpointName = Annotated[str, Meta(min_length=1, max_length=200)]
Sha256 = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
BlockHash = Annotated[str, Meta(pattern=r"\A0x[0-9a-f]{64}\Z")]


class ManifestFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file; ``min_block`` and ``max_block`` are those of its rows, null if rows have no block numbers.
    ``columns`` are bounds of whole numbers, booleans and short texts, as in the file's footer; a column may be
    missing."""

    location: Location
    rows: Count
    bytes: Count
    content_hash: Sha256
    min_block: Block | None = None
    max_block: Block | None = None
    columns: Annotated[dict[str, ColumnBounds], Meta(max_length=MAX_BOUNDS)] | None = None

    def __post_init__(self) -> None:
        if (self.min_block is None) != (self.max_block is None):
            raise ValueError("min_block and max_block come together")
        if self.min_block is not None and self.max_block is not None and self.min_block > self.max_block:
            raise ValueError("min_block is above max_block")
        if self.rows == 0 and self.min_block is not None:
            raise ValueError("a file without rows has no blocks")


class ChainEdges(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hashes that join a partition of a chain to its neighbours: of its first and its last block, and of the
    first one's parent. A commit compares ``parent_hash`` with the ``last_hash`` of the partition before it."""

    parent_hash: BlockHash
    first_hash: BlockHash
    last_hash: BlockHash


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``verified`` says how the rows were checked against the chain (``full``, ``bloom``, ``off``), ``endpoints``
    the names of the RPC endpoints that delivered their blocks, ``edges`` how the partition joins its neighbours.
    Rows that aren't a chain's, and partitions of older versions, have no edges."""

    files: Annotated[tuple[ManifestFile, ...], Meta(max_length=MAX_FILES)]
    schema_hash: Sha256
    verified: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    endpoints: Annotated[tuple[EndpointName, ...], Meta(max_length=MAX_ENDPOINTS)] | None = None
    edges: ChainEdges | None = None

    @property
    def row_count(self) -> int:
        return sum(file.rows for file in self.files)
