"""``DevChain``: a chain that follows from a seed, grows by ``mine`` and is reorganised by ``reorg``.

The contents of a block are a pure function of the seed, the branch and the height, so a chain of any length costs
nothing until it is read. Only the hash of its parent ties a block to the ones before it: the first read of a
block computes the hashes up to it, and keeps them. Encoded blocks are kept up to a limit of memory, and made
again after that.

The same calls in the same order give the same chain, block for block, on every machine. All methods are
thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock

from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.blocks import SealedBlock, seal
from tracelake.evm.devchain.profile import CHAIN_ID, GENESIS_TIME, DevChainProfile, parse_forks

CACHE_BYTES = 256 * 1024 * 1024
FINALITY = 64
MOST_BLOCKS = 2**48
_NO_PARENT = "0x" + "00" * 32


@dataclass(slots=True, eq=False)
class ChainBranch:
    """A branch starts at height ``first``, on top of a block of its parent. ``hashes`` are those of its own
    blocks that have been made, from ``first`` on without gaps."""

    number: int
    first: int
    parent: ChainBranch | None
    hashes: list[str] = field(default_factory=list)

    def at(self, height: int) -> ChainBranch:
        """The branch that the ancestor at ``height`` belongs to."""
        branch = self
        while height < branch.first:
            assert branch.parent is not None
            branch = branch.parent
        return branch

    def hash_at(self, height: int) -> str | None:
        """The hash of one of this branch's own blocks; None if it hasn't been made."""
        place = height - self.first
        return self.hashes[place] if place < len(self.hashes) else None


TransactionPlace = tuple[ChainBranch, int, int]


class DevChain:
    """A block is final ``finality`` blocks after it was mined, and safe after half as many; with None the chain has
    neither tag, as some chains. ``finalize`` makes blocks final sooner. ``forks`` are names of forks with the block
    that each begins at: ``("prague", "amsterdam@500")``."""

    def __init__(
        self,
        seed: int = 0,
        *,
        chain_id: int = CHAIN_ID,
        transactions_per_block: int = 4,
        logs_per_transaction: int = 2,
        steady: bool = False,
        forks: Sequence[str] = ("osaka",),
        blocks: int = 0,
        finality: int | None = FINALITY,
        block_seconds: int = 12,
        genesis_time: int = GENESIS_TIME,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.profile = DevChainProfile(
            seed=seed,
            chain_id=chain_id,
            transactions=transactions_per_block,
            logs=logs_per_transaction,
            steady=steady,
            forks=parse_forks(forks),
            block_seconds=block_seconds,
            genesis_time=genesis_time,
        )
        _check("blocks", blocks, 0)
        if finality is not None:
            _check("finality", finality, 0)
        self._finality = finality
        self._lock = RLock()
        self._branch = ChainBranch(0, 0, None)
        self._branches = 1
        self._head = blocks
        self._finalized = 0
        self._blocks: OrderedDict[tuple[int, int], SealedBlock] = OrderedDict()
        self._block_bytes = 0
        self._cache_bytes = cache_bytes
        self._by_hash: dict[str, tuple[ChainBranch, int]] = {}
        self._transactions: dict[str, list[TransactionPlace]] = {}

    @property
    def chain_id(self) -> int:
        return self.profile.chain_id

    @property
    def head(self) -> int:
        return self._head

    @property
    def finalized(self) -> int | None:
        with self._lock:
            return self._behind(self._finality)

    @property
    def safe(self) -> int | None:
        with self._lock:
            return self._behind(None if self._finality is None else (self._finality + 1) // 2)

    def mine(self, count: int = 1) -> int:
        """Add blocks; return the new head."""
        with self._lock:
            _check("count", count, 0, MOST_BLOCKS - self._head)
            self._head += count
            return self._head

    def reorg(self, depth: int, new_length: int | None = None) -> int:
        """Replace the last ``depth`` blocks by ``new_length`` others, by default as many: the same heights get
        other hashes. Return the new head, which may be lower or higher than the old one."""
        length = depth if new_length is None else new_length
        with self._lock:
            _check("depth", depth, 1, self._head)
            first = self._head - depth + 1
            _check("new_length", length, 0, MOST_BLOCKS - first)
            self._branch = ChainBranch(self._branches, first, self._branch.at(first - 1))
            self._branches += 1
            self._head = first - 1 + length
            # A test may remove final blocks as well; the tag must not point to blocks that are gone.
            self._finalized = min(self._finalized, first - 1)
            return self._head

    def rollback(self, depth: int) -> int:
        """Remove the last ``depth`` blocks; later blocks at these heights are others."""
        return self.reorg(depth, 0)

    def finalize(self, height: int) -> None:
        """Make every block up to ``height`` final, whatever the distance to the head."""
        with self._lock:
            _check("height", height, 0, self._head)
            self._finalized = max(self._finalized, height)

    def block(self, height: int) -> SealedBlock | None:
        """The block at ``height`` of the chain as it is now; None past the head."""
        with self._lock:
            if not 0 <= height <= self._head:
                return None
            return self._sealed(self._branch.at(height), height)

    def blocks(self, start: int, end: int) -> list[SealedBlock]:
        """The existing blocks from ``start`` to ``end``, of one moment: no reorg happens between them."""
        with self._lock:
            heights = range(max(0, start), min(end, self._head) + 1)
            return [self._sealed(self._branch.at(height), height) for height in heights]

    def block_by_hash(self, block_hash: str) -> SealedBlock | None:
        """A block of the current chain; None for one that a reorg has removed."""
        with self._lock:
            found = self._by_hash.get(block_hash)
            if found is None:
                self._make_hashes(self._head)
                found = self._by_hash.get(block_hash)
            return self._sealed(*found) if found is not None and self._is_canonical(*found) else None

    def transaction(self, transaction_hash: str) -> tuple[SealedBlock, int] | None:
        """The block that holds a transaction, and its position there."""
        with self._lock:
            # A transaction of a block that hasn't been made yet is unknown: make all blocks before giving up.
            if transaction_hash not in self._transactions:
                self._make_hashes(self._head)
            for branch, height, position in self._transactions.get(transaction_hash, ()):
                if self._is_canonical(branch, height):
                    return self._sealed(branch, height), position
            return None

    def _behind(self, distance: int | None) -> int | None:
        if distance is None:
            return self._finalized or None
        return max(0, self._head - distance, self._finalized)

    def _is_canonical(self, branch: ChainBranch, height: int) -> bool:
        return height <= self._head and self._branch.at(height) is branch

    def _make_hashes(self, height: int) -> None:
        """Make every block up to ``height`` that hasn't been made yet."""
        start = height
        while start >= 0 and self._branch.at(start).hash_at(start) is None:
            start -= 1
        for each in range(start + 1, height + 1):
            self._sealed(self._branch.at(each), each)

    def _sealed(self, branch: ChainBranch, height: int) -> SealedBlock:
        if (block := self._blocks.get((branch.number, height))) is not None:
            self._blocks.move_to_end((branch.number, height))
            return block
        # A block that was dropped from memory is made again, but its hashes are known already.
        new = branch.hash_at(height) is None
        if new:
            self._make_hashes(height - 1)
        parent = branch.at(height - 1).hash_at(height - 1) if height else _NO_PARENT
        assert parent is not None
        block = seal(self.profile, branch.number, height, parent)
        if new:
            self._remember(branch, block)
        self._keep(branch, block)
        return block

    def _remember(self, branch: ChainBranch, block: SealedBlock) -> None:
        branch.hashes.append(block.hash)
        self._by_hash[block.hash] = (branch, block.number)
        for position, each in enumerate(block.hashes):
            self._transactions.setdefault(each, []).append((branch, block.number, position))

    def _keep(self, branch: ChainBranch, block: SealedBlock) -> None:
        self._blocks[branch.number, block.number] = block
        self._block_bytes += block.size
        # The newest block stays, even if it is larger than the whole limit.
        while self._block_bytes > self._cache_bytes and len(self._blocks) > 1:
            _, dropped = self._blocks.popitem(last=False)
            self._block_bytes -= dropped.size


def _check(name: str, value: int, low: int, high: int = MOST_BLOCKS) -> None:
    if not low <= value <= high:
        raise Invalid("InvalidDevChain", f"{name} must be from {low} to {high}, not {value}")
