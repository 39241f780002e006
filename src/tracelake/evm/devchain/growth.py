"""How large a dev chain may become: what it holds is kept in memory, and whoever reaches its port may have it grow.

At its start a chain may have so many blocks and transactions, and as many again may be added while it is served, by
itself and by ``devchain_*``. What a reorg takes away counts as well: it is still known by its hash.
"""

from __future__ import annotations

from threading import Lock

from tracelake.domain.errors import Invalid

MOST_BLOCKS = 1_000_000
MOST_TRANSACTIONS = 4_000_000
"""Their hashes are kept in memory, about 350 bytes for each."""
MOST_AT_ONCE = 10_000
"""Blocks that one call adds or replaces; a chain makes about 2,000 of the usual size in a second."""
MOST_TRANSACTIONS_AT_ONCE = 40_000


class Growth:
    """Of a chain with so many ``transactions`` in a block, on average."""

    def __init__(self, transactions: int) -> None:
        self._per_block = max(1, transactions)
        self._left = min(MOST_BLOCKS, MOST_TRANSACTIONS // self._per_block)
        self._at_once = min(MOST_AT_ONCE, max(1, MOST_TRANSACTIONS_AT_ONCE // self._per_block))
        self._lock = Lock()

    def add(self, blocks: int) -> None:
        """``Invalid`` when these are too many."""
        if not 0 <= blocks <= self._at_once:
            raise Invalid(
                "InvalidDevChain",
                f"one call adds from 0 to {self._at_once:,} blocks to this chain, not {blocks}",
            )
        with self._lock:
            if blocks > self._left:
                raise Invalid(
                    "DevChainFull",
                    f"this chain can grow by {self._left:,} more blocks: start it again for more than that",
                )
            self._left -= blocks

    @staticmethod
    def check_depth(depth: int) -> None:
        if not 1 <= depth <= MOST_AT_ONCE:
            raise Invalid(
                "InvalidDevChain", f"one call takes from 1 to {MOST_AT_ONCE:,} blocks away, not {depth}"
            )
