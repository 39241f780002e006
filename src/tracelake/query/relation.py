"""A relation of a query, resolved: which version of which dataset it is, and where its committed rows are."""

from __future__ import annotations

from uuid import UUID

import msgspec

from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.buffer_schema import BufferSchema
from tracelake.domain.dag.model import Storage
from tracelake.operators.hot_and_cold import not_cold
from tracelake.operators.scope import Scope


class WantedBlocks(msgspec.Struct, frozen=True):
    """The blocks that a query can need of a relation, as far as its predicate tells; none if they are crossed."""

    first: int = 0
    last: int = MAX_BLOCK

    @property
    def bounded(self) -> bool:
        return (self.first, self.last) != (0, MAX_BLOCK)


class ColdFile(msgspec.Struct, frozen=True, array_like=True):
    """A committed file; blocks are null where its rows carry none."""

    location: str
    bytes: int
    min_block: int | None = None
    max_block: int | None = None


class ResolvedRelation(msgspec.Struct, frozen=True, kw_only=True):
    """``files`` are those that may hold wanted rows; ``sample`` is any of the version's, for its columns. ``cold``
    are the committed ranges among the wanted blocks, ``hot_version`` is whose rows stand for all other blocks."""

    name: str
    dataset: str | None
    dataset_uuid: UUID
    dataset_version: UUID
    revision: int
    storage: Storage
    output_name: str
    operator: str | None
    buffer_schema: BufferSchema | None
    hot_version: UUID | None
    sample: ColdFile | None
    cold: tuple[BlockRange, ...] | None
    files: tuple[ColdFile, ...] | None

    @property
    def rows_version(self) -> UUID | None:
        """The version whose hot table is read, if any is."""
        return self.dataset_version if self.storage is Storage.POSTGRES else self.hot_version

    def hot_spans(self, wanted: WantedBlocks) -> list[BlockRange]:
        """The wanted blocks that only the hot table can have; all of them for a dataset that is only hot."""
        return not_cold(Scope(wanted.first, wanted.last), self.cold or ())

    def needs_hot(self, wanted: WantedBlocks) -> bool:
        """For its rows; or for its columns, which no file can tell, when no row is wanted."""
        return self.rows_version is not None and (self.sample is None or bool(self.hot_spans(wanted)))
