"""Blocks that several endpoints agree on, for pools with a ``quorum``.

A proof shows that a block is whole, not that it is the chain's: an endpoint can make up a chain of its own, and
the columns that no hash covers. So each proven block is fetched from further endpoints until as many as the quorum
have the same hash and the same values in those columns. Where the proof isn't whole (``bloom``, ``senders: node``,
chains with parts that no hash covers), they must have the same values in all columns. A value that one of them
leaves out, as some clients do, is left out of the block: it has fewer witnesses than were demanded. If another
block has the quorum, the first one's endpoint is on a fork or lies; blocks that were returned before can't be
recalled, so that is an error, and the next try asks that endpoint last.

Every block is transferred as often as the quorum says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice

import pyarrow as pa
import pyarrow.compute as pc

from tracelake.evm.columns import UINT256_PARTS
from tracelake.evm.decode import decode
from tracelake.evm.raw_block import BlockMalformed, BlockMismatch, ChainTable, RawBlock
from tracelake.evm.rpc.errors import NoQuorum
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES, unproven_columns

_GROUP = 50
"""Number of blocks that are requested at once from the next endpoint."""
# The fields of node's-word columns that a client may leave out.
_OF_BLOCK = ("size", "totalDifficulty")
_OF_RECEIPT = ("blobGasPrice",)


def agreed_blocks(
    pool: Pool,
    proven: Iterator[RawBlock],
    *,
    receipts: bool,
    traces: bool,
    check: Callable[[RawBlock], None],
    whole_proof: bool,
) -> Iterator[RawBlock]:
    """The blocks of ``proven`` in their order, each as enough endpoints have it. ``check`` proves a block of
    another endpoint. ``whole_proof``: on Ethereum it leaves nothing open but the columns that are the node's
    word."""
    witnesses = _Witnesses(pool, receipts=receipts, traces=traces, check=check, whole_proof=whole_proof)
    while group := list(islice(proven, _GROUP)):
        # Those of one endpoint together: the others are asked about all of them at once.
        for _, some in groupby(group, key=lambda raw: raw.endpoint):
            yield from witnesses.agree(list(some))


class _Witnesses:
    def __init__(
        self,
        pool: Pool,
        *,
        receipts: bool,
        traces: bool,
        check: Callable[[RawBlock], None],
        whole_proof: bool,
    ) -> None:
        self._pool = pool
        self._receipts = receipts
        self._traces = traces
        self._check = check
        self._whole_proof = whole_proof
        self._quorum = pool.config.quorum

    def agree(self, proven: Sequence[RawBlock]) -> list[RawBlock]:
        votes: dict[int, list[RawBlock]] = {raw.number: [raw] for raw in proven}
        settled: dict[int, RawBlock] = {}
        while left := [number for number in votes if number not in settled]:
            asked = {raw.endpoint for number in left for raw in votes[number]}
            for raw in self._pool.fetch(left, receipts=self._receipts, traces=self._traces, avoid=asked):
                if any(raw.endpoint == known.endpoint for known in votes[raw.number]):
                    raise NoQuorum(f"block {raw.number}", self._quorum, self._views(votes[raw.number]))
                votes[raw.number].append(raw)
                if (winner := self._winner(votes[raw.number])) is not None:
                    settled[raw.number] = winner
        return [settled[raw.number] for raw in proven]

    def _winner(self, votes: Sequence[RawBlock]) -> RawBlock | None:
        for first in votes:
            same = [raw for raw in votes if self._same(first, raw)]
            if len(same) < self._quorum:
                continue
            for other in votes:
                if other not in same:
                    self._pool.distrust(
                        other.endpoint, f"{len(same)} endpoints have another block {first.number}"
                    )
            return self._proven(votes[0], same)
        return None

    def _proven(self, proven: RawBlock, same: Sequence[RawBlock]) -> RawBlock:
        first = same[0]
        if first.block["hash"] != proven.block["hash"]:
            names = ", ".join(raw.endpoint for raw in same)
            raise BlockMismatch(
                first.number,
                proven.endpoint,
                f"it has the hash {proven.block['hash']}, and {names} have {first.block['hash']}",
            )
        if first is not proven:
            # Only the columns differ that no hash covers; the rest must be as good as it was.
            self._check(first)
        return _witnessed(first, same)

    def _same(self, one: RawBlock, other: RawBlock) -> bool:
        if one is other:
            return True
        if one.block.get("hash") != other.block.get("hash"):
            return False
        # Two nodes of one kind give the same JSON, which is compared at once.
        if (one.block, one.receipts, one.traces) == (other.block, other.receipts, other.traces):
            return True
        return all(self._same_word(one, other, table) for table in self._tables())

    def _tables(self) -> Iterator[ChainTable]:
        yield from (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.WITHDRAWALS)
        if self._receipts:
            yield from (ChainTable.RECEIPTS, ChainTable.LOGS)
        if self._traces:
            yield ChainTable.TRACES

    def _same_word(self, one: RawBlock, other: RawBlock, table: ChainTable) -> bool:
        """Whether both have the same in the columns that are the node's word; null is no contradiction. It is one
        in the others, which are compared where the proof isn't whole."""
        unproven = unproven_columns(table)
        whole = self._whole_proof and one.profile.proves_as_ethereum
        if whole and not unproven:
            return True
        chain_id = self._pool.selector.chain_id or 0
        try:
            rows, others = decode([one], table, chain_id), decode([other], table, chain_id)
        except BlockMalformed:
            return False
        if len(rows) != len(others):
            return False
        own = {name for each in unproven for name in (each, *(each + part for part in UINT256_PARTS))}
        return all(
            _alike(rows.column(name), others.column(name))
            if name in own
            else whole or rows.column(name).equals(others.column(name))
            for name in TABLES[table].arrow.names
        )

    def _views(self, votes: Sequence[RawBlock]) -> dict[str, str]:
        first = votes[0]
        views = {
            raw.endpoint: f"{raw.block['hash']}"
            + ("" if self._same(first, raw) or raw.block["hash"] != first.block["hash"] else ", other values")
            for raw in votes
        }
        silent = {
            each.name: each.left_out or each.health.last_problem or "not asked, or no answer"
            for each in self._pool.selector.endpoints
            if each.name not in views
        }
        return views | silent


def _alike(one: pa.Array, other: pa.Array) -> bool:
    if pa.types.is_nested(one.type):
        return bool(one.equals(other))
    # Equality with null is null, which counts as no contradiction.
    return bool(pc.all(pc.fill_null(pc.equal(one, other), True)).as_py() in (True, None))


def _witnessed(first: RawBlock, same: Sequence[RawBlock]) -> RawBlock:
    """Without the values that not all of them gave."""
    for key in _OF_BLOCK:
        if any(raw.block.get(key) is None for raw in same):
            first.block.pop(key, None)
    for place, receipt in enumerate(first.receipts or ()):
        for key in _OF_RECEIPT:
            if any(raw.receipts is not None and raw.receipts[place].get(key) is None for raw in same):
                receipt.pop(key, None)
    return first
