"""Which fork a height belongs to. A fork begins at a height, on top of a block of the fork before it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Fork:
    """``hashes`` are those of its own blocks that have been made, from ``first`` on without gaps."""

    number: int
    first: int
    parent: Fork | None
    hashes: list[str] = field(default_factory=list)

    def at(self, height: int) -> Fork:
        """The fork that has the block at ``height``, seen from a block of this one."""
        fork = self
        while height < fork.first:
            assert fork.parent is not None
            fork = fork.parent
        return fork

    def hash_at(self, height: int) -> str | None:
        """Of a block of this fork's own, if it has been made."""
        place = height - self.first
        return self.hashes[place] if place < len(self.hashes) else None
