"""``fetch_blocks``: the blocks of a range, one after another, whole and proven.

Several requests are under way ahead of the reader, bounded by blocks and by bytes, so that memory stays the same
however long the range is and however full its blocks are. Each block is verified before it is handed out, and must
follow the one before it. One that doesn't is fetched again, block and receipts together, from another endpoint;
when nobody has a better one the error says which block, which endpoints and what didn't match.

A range that is read while the chain changes ends in an error rather than in a mixture: blocks that were handed out
already can't be taken back, and the caller begins again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.block_errors import BlockMalformed, BlockMismatch
from tracelake.evm.raw_block import RawBlock, Verify
from tracelake.evm.rpc.blocks import BATCH_KIND, Fetched
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.verify import check_block

WINDOW_BYTES = 6 * 1024 * 1024
"""Of answers that are under way or wait for the reader. Parsed they take about six times as much."""
_REQUEST_BYTES = 768 * 1024
_FIRST_BLOCKS = 4
"""Asked for at once, and of nobody else, before it is known how large a block is."""
_MOST_AHEAD = 16
_IN_STORE = 2
_REFETCHES = 4
_REFETCH_PAUSE = 0.2


def fetch_blocks(
    pool: Pool, blocks: range, *, receipts: bool, traces: bool = False, verify: Verify = Verify.FULL
) -> Iterator[RawBlock]:
    """In the order of ``blocks``, which is a plain range upwards. Raises ``BlockNotFound`` for one past the tip,
    ``BlockMismatch`` or ``BlockMalformed`` for one that nobody has right, ``RpcUnavailable`` when nobody answers.
    """
    if blocks.step != 1 or (blocks and blocks.start < 0):
        raise Invalid("InvalidRange", f"blocks are read upwards, one by one, from 0 on: not {blocks}")
    return _read(
        _Ahead(pool, blocks, receipts=receipts, traces=traces), _Proof(pool, receipts, traces, verify)
    )


def _read(ahead: _Ahead, proof: _Proof) -> Iterator[RawBlock]:
    try:
        while (some := ahead.next()) is not None:
            while some:
                # Handed out and forgotten: nothing here keeps a block that the reader is done with.
                yield proof.prove(some.popleft())
    finally:
        ahead.cancel()


@dataclass(slots=True)
class _Request:
    answer: Future[Fetched]
    blocks: int


class _Ahead:
    """Requests ahead of the reader, in order."""

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
        self._learn(fetched)
        self._send()
        return deque(fetched.blocks)

    def cancel(self) -> None:
        for request in self._under_way:
            request.answer.cancel()
        self._under_way.clear()

    def _read_rest(self) -> deque[RawBlock] | None:
        """What is asked for at once needs no thread: at the tip every little wait counts."""
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
        """A reader that is slower than the endpoints needs no more than a few answers in store."""
        if not self._under_way:
            return True
        if self._block_bytes is None:
            return False
        answered = [request.answer for request in self._under_way if request.answer.done()]
        if len(self._under_way) >= self._most or len(answered) >= _IN_STORE:
            return False
        held = sum(answer.result().size for answer in answered if answer.exception() is None)
        awaited = sum(request.blocks for request in self._under_way if not request.answer.done())
        return held + (awaited + self._size()) * self._block_bytes <= WINDOW_BYTES

    def _size(self) -> int:
        """Blocks in one request: what an endpoint takes at once, what an answer may weigh, and enough requests
        to go on at the same time."""
        if self._block_bytes is None:
            return _FIRST_BLOCKS
        by_bytes = int(_REQUEST_BYTES / max(self._block_bytes, 1.0))
        endpoints = self._pool.roster.usable()
        calls = max((endpoint.batch_size(BATCH_KIND) for endpoint in endpoints), default=1)
        return max(1, min(by_bytes, calls // (1 + self._receipts + self._traces)))

    def _learn(self, fetched: Fetched) -> None:
        """Blocks grow suddenly and shrink slowly, as far as memory is concerned."""
        size = fetched.size / max(1, len(fetched.blocks))
        before = self._block_bytes
        self._block_bytes = size if before is None or size > before else before + 0.2 * (size - before)


class _Proof:
    """Each block verified, and the hash of the last one for the next to follow."""

    def __init__(self, pool: Pool, receipts: bool, traces: bool, verify: Verify) -> None:
        self._pool = pool
        self._receipts = receipts
        self._traces = traces
        self._verify = verify
        self._last: str | None = None

    def prove(self, raw: RawBlock) -> RawBlock:
        """The block itself, or a better one from elsewhere."""
        wrong: dict[str, BlockMismatch | BlockMalformed] = {}
        for tries in range(_REFETCHES, -1, -1):
            try:
                self._check(raw)
            except (BlockMismatch, BlockMalformed) as mismatch:
                wrong[raw.endpoint] = mismatch
                self._pool.distrust(raw.endpoint, mismatch.message)
                if not tries:
                    break
                raw = self._fetch_again(raw, wrong)
            else:
                self._last = raw.block["hash"]
                return raw
        raise _all_wrong(raw.number, wrong)

    def _check(self, raw: RawBlock) -> None:
        check_block(raw, self._verify, self._pool.roster.chain_id)
        parent = raw.block.get("parentHash")
        if self._last is not None and parent != self._last:
            raise BlockMismatch(
                raw.number,
                raw.endpoint,
                f"parentHash {parent} isn't the hash of block {raw.number - 1}, {self._last}",
            )

    def _fetch_again(self, raw: RawBlock, wrong: dict[str, BlockMismatch | BlockMalformed]) -> RawBlock:
        if len(wrong) == len(self._pool.roster.endpoints):
            # Everybody was asked: what is wrong may pass, as when the chain changed between two answers.
            self._pool.roster.pause(_REFETCH_PAUSE)
        try:
            [again] = self._pool.fetch(
                [raw.number], receipts=self._receipts, traces=self._traces, avoid=wrong
            )
        except Unavailable as away:
            raise _all_wrong(raw.number, wrong, f"; nobody else could be asked ({away.message})") from None
        return again


def _all_wrong(
    number: int, wrong: dict[str, BlockMismatch | BlockMalformed], more: str = ""
) -> BlockMismatch | BlockMalformed:
    if len(wrong) == 1 and not more:
        [only] = wrong.values()
        return only
    said = "; ".join(_without_block(each, number) for each in wrong.values())
    return BlockMismatch(number, ", ".join(wrong), f"{said}{more}")


def _without_block(error: BlockMismatch | BlockMalformed, number: int) -> str:
    return error.message.removeprefix(f"block {number} from ")
