"""``DevChainProfile`` and ``Growth``: the properties of a dev chain, and the limits on its size.

With a branch and a height, a profile determines a block. A chain is kept in memory, and any client of its port
may add blocks; so both its size at the start and the growth while it is served, by itself and by
``devchain_*``, are bounded by ``MOST_BLOCKS`` and ``MOST_TRANSACTIONS``. Blocks that a reorg removes count as
well: they are still known by their hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock

from tracelake.domain.errors import Invalid
from tracelake.evm.forks import Fork, ForkStart, Schedule, fork_named, scheduled

CHAIN_ID = 31_339
GENESIS_TIME = 1_735_689_600  # 2025-01-01 00:00:00 UTC
MOST_TRANSACTIONS_PER_BLOCK = 2_000
MOST_LOGS_PER_TRANSACTION = 2_000
MOST_LOGS_PER_BLOCK = 50_000
MOST_BLOCKS = 1_000_000
MOST_TRANSACTIONS = 4_000_000
"""Their hashes are kept in memory, about 350 bytes for each transaction."""
MOST_AT_ONCE = 10_000
"""Maximum number of blocks that one call adds or replaces; a chain makes about 1,500 of the usual size per
second."""
MOST_TRANSACTIONS_AT_ONCE = 40_000


FORKS_OF_CHAIN: Schedule = (ForkStart(Fork.OSAKA, block=0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevChainProfile:
    """``transactions`` and ``logs`` are averages, per block and per transaction. On a ``steady`` chain they are
    exact in every block but the first; otherwise there are empty blocks, and small and large ones.

    ``forks`` says from which block on the chain has the rules of which fork of Ethereum: on its first day there
    were no base fee and no withdrawals, transactions had no chain id, and receipts a state root instead of a
    status.
    """

    seed: int = 0
    chain_id: int = CHAIN_ID
    transactions: int = 4
    logs: int = 2
    steady: bool = False
    forks: Schedule = FORKS_OF_CHAIN
    block_seconds: int = 12
    genesis_time: int = GENESIS_TIME

    def __post_init__(self) -> None:
        for name, low, high in (
            ("seed", -(2**63), 2**63 - 1),
            ("chain_id", 1, 2**53),
            ("transactions", 0, MOST_TRANSACTIONS_PER_BLOCK),
            ("logs", 0, MOST_LOGS_PER_TRANSACTION),
            ("block_seconds", 0, 2**32),
            ("genesis_time", 0, 2**40),
        ):
            value: int = getattr(self, name)
            if not low <= value <= high:
                raise Invalid("InvalidDevChain", f"{name} must be from {low} to {high}, not {value}")
        if self.transactions * self.logs > MOST_LOGS_PER_BLOCK:
            raise Invalid(
                "InvalidDevChain",
                f"{self.transactions} transactions per block with {self.logs} logs each are "
                f"{self.transactions * self.logs:,} logs per block, the most is {MOST_LOGS_PER_BLOCK:,}",
            )

    def fork_at(self, height: int) -> Fork:
        return scheduled(self.forks, height, 0)


def parse_forks(names: Sequence[str]) -> Schedule:
    """Forks by name, each with the block that it begins at: ``("prague", "amsterdam@500")``."""
    starts = []
    for name in names:
        fork_name, at, block = name.partition("@")
        # ``isdigit`` alone accepts digits of other scripts.
        if not fork_name or (at and not (block.isascii() and block.isdigit() and len(block) <= 15)):
            raise Invalid("InvalidDevChain", f"fork {name[:40]!r}: NAME or NAME@BLOCK is wanted")
        fork = fork_named(fork_name)
        if fork is None:
            known = ", ".join(fork.name.lower() for fork in Fork)
            raise Invalid("InvalidDevChain", f"fork {fork_name[:40]!r} isn't known; there are {known}")
        starts.append(ForkStart(fork, block=int(block or 0)))
    places = [(start.block or 0, start.fork) for start in starts]
    if not places or places[0][0] or any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(places)):
        raise Invalid(
            "InvalidDevChain",
            "the first fork must begin at block 0, and each further one must be later than the one before and "
            "begin at a higher block: osaka, amsterdam@500",
        )
    return tuple(starts)


class Growth:
    """The blocks that may still be added to a chain with ``transactions`` per block on average."""

    def __init__(self, transactions: int) -> None:
        self._per_block = max(1, transactions)
        self._left = min(MOST_BLOCKS, MOST_TRANSACTIONS // self._per_block)
        self._at_once = min(MOST_AT_ONCE, max(1, MOST_TRANSACTIONS_AT_ONCE // self._per_block))
        self._lock = Lock()

    def add(self, blocks: int) -> None:
        """Count new blocks. Raises ``Invalid`` if these are too many."""
        if not 0 <= blocks <= self._at_once:
            raise Invalid(
                "InvalidDevChain",
                f"one call adds 0 to {self._at_once:,} blocks to this chain, not {blocks}",
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
            raise Invalid("InvalidDevChain", f"one call removes 1 to {MOST_AT_ONCE:,} blocks, not {depth}")
