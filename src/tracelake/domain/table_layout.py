"""How a hot table is laid out: what people look up in it, and how many blocks make a partition of it.

Decided when the table is made, by the first rows that are committed; a table that exists keeps its layout.
"""

from __future__ import annotations

from msgspec import Struct

from tracelake.domain.errors import Invalid

MAX_INDEXES = 16


class TableLayout(Struct, frozen=True):
    """``indexes`` are columns that are looked up together, in their order. With ``partition_blocks`` the table is
    partitioned by ranges of so many blocks, each made when its first rows come; it needs a column
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
