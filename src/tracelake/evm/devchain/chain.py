"""DevChain: a chain that follows from a seed, grows by ``mine`` and changes its mind by ``reorg``.

What a block holds is a pure function of the seed, the fork and the height, so a chain of any length costs
nothing until it is read. The one thing that ties a block to the ones before it is the hash of its parent: the
first look at a block makes the hashes up to it, and keeps them. Encoded blocks are kept up to a limit of
memory and made again when they are asked for after that.

The same calls in the same order give the same chain, block for block, on every machine. All methods may be
called from any thread.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock

from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.forks import Fork
from tracelake.evm.devchain.profile import CHAIN_ID, GENESIS_TIME, Profile
from tracelake.evm.devchain.seal import SealedBlock, seal

CACHE_BYTES = 256 * 1024 * 1024
FINALITY = 64
MOST_BLOCKS = 2**48
_NO_PARENT = "0x" + "00" * 32

Place = tuple[Fork, int, int]


class DevChain:
    """``finality`` blocks after it was mined a block is final, and half as many after, safe; with None the
    chain knows neither, as some chains do. ``finalize`` makes blocks final sooner."""

    def __init__(
        self,
        seed: int = 0,
        *,
        chain_id: int = CHAIN_ID,
        transactions_per_block: int = 4,
        logs_per_transaction: int = 2,
        steady: bool = False,
        frontier: int = 0,
        blocks: int = 0,
        finality: int | None = FINALITY,
        block_seconds: int = 12,
        genesis_time: int = GENESIS_TIME,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.profile = Profile(
            seed=seed,
            chain_id=chain_id,
            transactions=transactions_per_block,
            logs=logs_per_transaction,
            steady=steady,
            frontier=frontier,
            block_seconds=block_seconds,
            genesis_time=genesis_time,
        )
        _check("blocks", blocks, 0)
        if finality is not None:
            _check("finality", finality, 0)
        self._finality = finality
        self._lock = RLock()
        self._fork = Fork(0, 0, None)
        self._forks = 1
        self._head = blocks
        self._finalized = 0
        self._blocks: OrderedDict[tuple[int, int], SealedBlock] = OrderedDict()
        self._block_bytes = 0
        self._cache_bytes = cache_bytes
        self._by_hash: dict[str, tuple[Fork, int]] = {}
        self._transactions: dict[str, list[Place]] = {}

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
        """Add blocks; the new head."""
        with self._lock:
            _check("count", count, 0, MOST_BLOCKS - self._head)
            self._head += count
            return self._head

    def reorg(self, depth: int, new_length: int | None = None) -> int:
        """Replace the last ``depth`` blocks by ``new_length`` others (as many, if that isn't said): the same
        heights get other hashes. The new head, which may be lower or higher than the old one."""
        length = depth if new_length is None else new_length
        with self._lock:
            _check("depth", depth, 1, self._head)
            first = self._head - depth + 1
            _check("new_length", length, 0, MOST_BLOCKS - first)
            self._fork = Fork(self._forks, first, self._fork.at(first - 1))
            self._forks += 1
            self._head = first - 1 + length
            self._finalized = min(self._finalized, first - 1)
            return self._head

    def rollback(self, depth: int) -> int:
        """Take the last ``depth`` blocks away; what is mined on top afterwards are other blocks."""
        return self.reorg(depth, 0)

    def finalize(self, height: int) -> None:
        """Everything up to ``height`` is final, whatever the distance to the head."""
        with self._lock:
            _check("height", height, 0, self._head)
            self._finalized = max(self._finalized, height)

    def block(self, height: int) -> SealedBlock | None:
        """The block at ``height`` of the chain as it is now; None past the head."""
        with self._lock:
            if not 0 <= height <= self._head:
                return None
            return self._sealed(self._fork.at(height), height)

    def blocks(self, start: int, end: int) -> list[SealedBlock]:
        """Those from ``start`` to ``end`` that there are, all of one moment: no reorg happens between them."""
        with self._lock:
            heights = range(max(0, start), min(end, self._head) + 1)
            return [self._sealed(self._fork.at(height), height) for height in heights]

    def block_by_hash(self, block_hash: str) -> SealedBlock | None:
        """None as well for a block that a reorg has taken away."""
        with self._lock:
            found = self._by_hash.get(block_hash)
            if found is None:
                self._make_hashes(self._head)
                found = self._by_hash.get(block_hash)
            return self._sealed(*found) if found is not None and self._is_canonical(*found) else None

    def transaction(self, transaction_hash: str) -> tuple[SealedBlock, int] | None:
        """The block that holds a transaction, and its position there."""
        with self._lock:
            if transaction_hash not in self._transactions:
                self._make_hashes(self._head)
            for fork, height, position in self._transactions.get(transaction_hash, ()):
                if self._is_canonical(fork, height):
                    return self._sealed(fork, height), position
            return None

    def _behind(self, distance: int | None) -> int | None:
        if distance is None:
            return self._finalized or None
        return max(0, self._head - distance, self._finalized)

    def _is_canonical(self, fork: Fork, height: int) -> bool:
        return height <= self._head and self._fork.at(height) is fork

    def _make_hashes(self, height: int) -> None:
        """Make every block up to ``height`` that hasn't been made yet."""
        start = height
        while start >= 0 and self._fork.at(start).hash_at(start) is None:
            start -= 1
        for each in range(start + 1, height + 1):
            self._sealed(self._fork.at(each), each)

    def _sealed(self, fork: Fork, height: int) -> SealedBlock:
        if (block := self._blocks.get((fork.number, height))) is not None:
            self._blocks.move_to_end((fork.number, height))
            return block
        new = fork.hash_at(height) is None
        if new:
            self._make_hashes(height - 1)
        parent = fork.at(height - 1).hash_at(height - 1) if height else _NO_PARENT
        assert parent is not None
        block = seal(self.profile, fork.number, height, parent)
        if new:
            self._remember(fork, block)
        self._keep(fork, block)
        return block

    def _remember(self, fork: Fork, block: SealedBlock) -> None:
        fork.hashes.append(block.hash)
        self._by_hash[block.hash] = (fork, block.number)
        for position, each in enumerate(block.hashes):
            self._transactions.setdefault(each, []).append((fork, block.number, position))

    def _keep(self, fork: Fork, block: SealedBlock) -> None:
        self._blocks[fork.number, block.number] = block
        self._block_bytes += block.size
        while self._block_bytes > self._cache_bytes and len(self._blocks) > 1:
            _, dropped = self._blocks.popitem(last=False)
            self._block_bytes -= dropped.size


def _check(name: str, value: int, low: int, high: int = MOST_BLOCKS) -> None:
    if not low <= value <= high:
        raise Invalid("InvalidDevChain", f"{name} must be from {low} to {high}, not {value}")
