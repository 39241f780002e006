"""``fetch_blocks``: the blocks of a range, one after another, whole and proven.

Several requests run ahead of the reader, bounded by blocks and by bytes, so memory depends neither on the
length of the range nor on the size of its blocks. Each block is verified before it is returned, and must follow
the one before it. A block that doesn't is fetched again, with its receipts, from another endpoint; if no
endpoint has a better one, the error names the block, the endpoints and the mismatch. A block that this version
can't prove is an error that isn't retried, once every endpoint has given the same.

A range that is read during a reorg ends in an error rather than in a mixture of two chains: blocks that were
returned already can't be recalled, and the caller starts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.profiles.registry import refuse_unprovable
from tracelake.evm.quorum import agreed_blocks
from tracelake.evm.raw_block import (
    BlockMalformed,
    BlockMismatch,
    ChainTable,
    RawBlock,
    Senders,
    Unprovable,
    Verify,
    need_receipts,
)
from tracelake.evm.rpc.blocks import BATCH_KIND, FetchedBlocks
from tracelake.evm.rpc.config import PoolConfig
from tracelake.evm.rpc.pool import Pool, kept_pool
from tracelake.evm.verify import check_block

WINDOW_BYTES = 6 * 1024 * 1024
"""Maximum size of answers that are pending or wait for the reader. Parsed they take about six times as much."""
_REQUEST_BYTES = 768 * 1024
_FIRST_BLOCKS = 4
"""Blocks in the only request that is sent before the size of a block is known."""
_MOST_AHEAD = 16
_IN_STORE = 2
_REFETCHES = 4
_REFETCH_PAUSE = 0.2


WrongBlock = BlockMismatch | BlockMalformed | Unprovable


def fetch_blocks(
    pool: Pool,
    blocks: range,
    *,
    receipts: bool,
    traces: bool = False,
    verify: Verify = Verify.FULL,
    senders: Senders = Senders.DERIVE,
) -> Iterator[RawBlock]:
    """Blocks in the order of ``blocks``, a range with step 1. Raises ``BlockNotFound`` past the head,
    ``BlockMismatch`` or ``BlockMalformed`` if no endpoint has a correct block, ``Unprovable`` if none has one
    that can be proven, ``RpcUnavailable`` if none answers.
    """
    if blocks.step != 1 or (blocks and blocks.start < 0):
        raise Invalid("InvalidRange", f"blocks are read upwards, one by one, from 0 on: not {blocks}")
    if verify is Verify.FULL:
        # A configured profile is known before the first answer, and some can't be proven at all.
        refuse_unprovable(pool.profile)
    proof = _Proof(pool, receipts, traces, verify, senders)
    proven = _read(_Ahead(pool, blocks, receipts=receipts, traces=traces), proof)
    if pool.config.quorum == 1:
        return proven
    return agreed_blocks(
        pool,
        proven,
        receipts=receipts,
        traces=traces,
        check=proof.check_alone,
        whole_proof=verify is Verify.FULL and senders is Senders.DERIVE,
    )


def fetch_span(
    config: PoolConfig,
    span: BlockRange,
    tables: Collection[ChainTable],
    verify: Verify,
    senders: Senders,
    *,
    share: float,
) -> Iterator[RawBlock]:
    """The blocks of ``span`` with all that ``tables`` hold of them, through this process's kept pool. ``share`` is
    its part of the endpoints' limits."""
    with kept_pool(config, share=share) as pool:
        yield from fetch_blocks(
            pool,
            range(span.start, span.end + 1),
            receipts=need_receipts(tables, verify),
            traces=ChainTable.TRACES in tables,
            verify=verify,
            senders=senders,
        )


def _read(ahead: _Ahead, proof: _Proof) -> Iterator[RawBlock]:
    try:
        while (some := ahead.next()) is not None:
            while some:
                # Removed before it is returned: nothing here keeps a block that the reader is done with.
                yield proof.prove(some.popleft())
    finally:
        # A reader that stops early leaves requests in the queue, which would be sent for nothing.
        ahead.cancel()


@dataclass(slots=True)
class _Request:
    answer: Future[FetchedBlocks]
    blocks: int


class _Ahead:
    """Sends requests ahead of the reader, and returns their blocks in order."""

    def __init__(self, pool: Pool, blocks: range, *, receipts: bool, traces: bool) -> None:
        self._pool = pool
        self._left = blocks
        self._receipts = receipts
        self._traces = traces
        self._under_way: deque[_Request] = deque()
        self._block_bytes: float | None = None
        self._most = min(_MOST_AHEAD, pool.parallelism)

    def next(self) -> deque[RawBlock] | None:
        """The next blocks, or None after the last."""
        if not self._under_way and len(self._left) <= self._size():
            return self._read_rest()
        self._send()
        if not self._under_way:
            return None
        fetched = self._under_way.popleft().answer.result()
        # Before more is sent: the next requests depend on the size of these blocks.
        self._learn(fetched)
        self._send()
        return deque(fetched.blocks)

    def cancel(self) -> None:
        for request in self._under_way:
            request.answer.cancel()
        self._under_way.clear()

    def _read_rest(self) -> deque[RawBlock] | None:
        """Fetch a single request without a thread: at the head of the chain every little wait counts."""
        numbers, self._left = self._left, self._left[:0]
        if not numbers:
            return None
        fetched = self._pool.fetch_sized(numbers, receipts=self._receipts, traces=self._traces)
        return deque(fetched.blocks)

    def _send(self) -> None:
        while self._left and self._has_room():
            numbers, self._left = self._left[: self._size()], self._left[self._size() :]
            answer = self._pool.fetch_later(numbers, receipts=self._receipts, traces=self._traces)
            self._under_way.append(_Request(answer, len(numbers)))

    def _has_room(self) -> bool:
        """Whether another request fits. A reader slower than the endpoints needs only a few answers in store."""
        if not self._under_way:
            return True
        if self._block_bytes is None:
            return False
        answered = [request.answer for request in self._under_way if request.answer.done()]
        if len(self._under_way) >= self._most or len(answered) >= _IN_STORE:
            return False
        # A failed answer holds no bytes; its error is raised when its turn comes.
        held = sum(answer.result().size for answer in answered if answer.exception() is None)
        awaited = sum(request.blocks for request in self._under_way if not request.answer.done())
        return held + (awaited + self._size()) * self._block_bytes <= WINDOW_BYTES

    def _size(self) -> int:
        """Blocks in one request: limited by the batch size of the endpoints and by the size of an answer."""
        if self._block_bytes is None:
            return _FIRST_BLOCKS
        by_bytes = int(_REQUEST_BYTES / max(self._block_bytes, 1.0))
        endpoints = self._pool.selector.usable()
        calls = max((endpoint.batch_size(BATCH_KIND) for endpoint in endpoints), default=1)
        return max(1, min(by_bytes, calls // (1 + self._receipts + self._traces)))

    def _learn(self, fetched: FetchedBlocks) -> None:
        """Update the estimated block size: up at once, which protects memory, and down slowly."""
        size = fetched.size / max(1, len(fetched.blocks))
        before = self._block_bytes
        self._block_bytes = size if before is None or size > before else before + 0.2 * (size - before)


class _Proof:
    """Verifies blocks, and that each follows the one before it."""

    def __init__(self, pool: Pool, receipts: bool, traces: bool, verify: Verify, senders: Senders) -> None:
        self._pool = pool
        self._receipts = receipts
        self._traces = traces
        self._verify = verify
        self._senders = senders
        self._last: str | None = None

    def prove(self, raw: RawBlock) -> RawBlock:
        """The block itself, or a correct one from another endpoint."""
        wrong: dict[str, WrongBlock] = {}
        for tries in range(_REFETCHES, -1, -1):
            try:
                self._check(raw)
            except (BlockMismatch, BlockMalformed, Unprovable) as mismatch:
                # By endpoint: each is named once in the error, with its last mismatch.
                wrong[raw.endpoint] = mismatch
                # One endpoint alone could claim a fork that doesn't exist; all of them are right about it.
                if self._nobody_can_prove(wrong):
                    raise
                self._pool.distrust(raw.endpoint, mismatch.message)
                # The last try is only checked: another block wouldn't be.
                if not tries:
                    break
                raw = self._fetch_again(raw, wrong)
            else:
                self._last = raw.block["hash"]
                return raw
        raise _all_wrong(raw.number, wrong)

    def check_alone(self, raw: RawBlock) -> None:
        """Verify a block, whatever comes before it."""
        check_block(raw, self._verify, self._pool.selector.chain_id, self._senders)

    def _check(self, raw: RawBlock) -> None:
        self.check_alone(raw)
        parent = raw.block.get("parentHash")
        # The first block has no predecessor here; its parent is the caller's business.
        if self._last is not None and parent != self._last:
            raise BlockMismatch(
                raw.number,
                raw.endpoint,
                f"parentHash {parent} isn't the hash of block {raw.number - 1}, {self._last}",
            )

    def _nobody_can_prove(self, wrong: dict[str, WrongBlock]) -> bool:
        asked_all = len(wrong) >= len(self._pool.selector.usable())
        return asked_all and all(isinstance(each, Unprovable) for each in wrong.values())

    def _fetch_again(self, raw: RawBlock, wrong: dict[str, WrongBlock]) -> RawBlock:
        if len(wrong) == len(self._pool.selector.endpoints):
            # All endpoints were asked. The mismatch may pass, as after a reorg between two answers.
            self._pool.selector.pause(_REFETCH_PAUSE)
        try:
            [again] = self._pool.fetch(
                [raw.number], receipts=self._receipts, traces=self._traces, avoid=wrong
            )
        except Unavailable as away:
            raise _all_wrong(
                raw.number, wrong, f"; no other endpoint was available ({away.message})"
            ) from None
        return again


def _all_wrong(number: int, wrong: dict[str, WrongBlock], more: str = "") -> WrongBlock:
    first, *others = wrong.values()
    # What every endpoint answers so won't be answered otherwise the next time.
    if not more and (not others or all(isinstance(each, Invalid) for each in wrong.values())):
        return first
    mismatches = "; ".join(_without_block(each, number) for each in wrong.values())
    return BlockMismatch(number, ", ".join(wrong), f"{mismatches}{more}")


def _without_block(error: WrongBlock, number: int) -> str:
    return error.message.removeprefix(f"block {number} from ")
