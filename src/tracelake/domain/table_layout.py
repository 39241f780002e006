"""The layout of a hot table: its indexes, and the number of blocks in each of its partitions.

The first commit decides it, when the table is created; an existing table keeps its layout.
"""

from __future__ import annotations

from msgspec import Struct

from tracelake.domain.errors import Invalid

MAX_INDEXES = 16


class TableLayout(Struct, frozen=True):
    """Each of ``indexes`` lists the columns of one index, in order. With ``partition_blocks`` the table is
    partitioned into ranges of that many blocks, each created with its first rows; this needs a column
    ``block_number``."""

    indexes: tuple[tuple[str, ...], ...] = ()
    partition_blocks: int | None = None

    def __post_init__(self) -> None:
        if len(self.indexes) > MAX_INDEXES or not all(self.indexes):
            raise Invalid(
                "InvalidLayout", f"at most {MAX_INDEXES} indexes, each of one column or more: {self.indexes}"
            )
        if self.partition_blocks is not None and self.partition_blocks < 1:
            raise Invalid("InvalidLayout", f"partition_blocks must be 1 or more, not {self.partition_blocks}")


PLAIN = TableLayout()
