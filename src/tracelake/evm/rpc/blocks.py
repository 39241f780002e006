"""Whole blocks from one endpoint after another, until each is complete.

Block, receipts and traces are asked for in one batch of one endpoint, so that they speak of the same block even
while the chain changes. What one endpoint couldn't give is asked of the next; what it did give is kept. Where there
is no eth_getBlockReceipts, each transaction's receipt is asked for. Nothing here is proven yet, but it has the
right number and as many receipts as transactions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from tracelake.domain.errors import Unavailable
from tracelake.evm.raw_block import RawBlock
from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.errors import BlockNotFound
from tracelake.evm.rpc.exchange import Call, Outcome
from tracelake.evm.rpc.problem import Kind, Problem
from tracelake.evm.rpc.quantity import read_quantity
from tracelake.evm.rpc.question import Question

if TYPE_CHECKING:
    from tracelake.evm.rpc.pool import Pool

BATCH_KIND = "blocks"
BLOCK = "eth_getBlockByNumber"
BLOCK_RECEIPTS = "eth_getBlockReceipts"
RECEIPT = "eth_getTransactionReceipt"
TRACES = "trace_block"


@dataclass(frozen=True, slots=True)
class Fetched:
    """``size`` in bytes, as they came over the wire."""

    blocks: list[RawBlock]
    size: int


def fetch_some(
    pool: Pool, numbers: Sequence[int], *, receipts: bool, traces: bool, avoid: Iterable[str] = ()
) -> Fetched:
    if not numbers:
        return Fetched([], 0)
    what = f"block {numbers[0]}" if len(numbers) == 1 else f"blocks {numbers[0]} to {numbers[-1]}"
    question = pool.question(
        what,
        needs=[BLOCK, TRACES] if traces else [BLOCK],
        prefers=[BLOCK_RECEIPTS] if receipts else [],
        avoid=avoid,
        block=max(numbers),
    )
    found: dict[int, RawBlock] = {}
    left: Sequence[int] = numbers
    size = 0
    while left:
        with pool.roster.ask(question, len(left) * (1 + receipts + traces)) as endpoint:
            reading = _Reading(pool, endpoint, question, receipts=receipts, traces=traces)
            reading.read(left)
        found |= reading.found
        size += reading.size
        if reading.found:
            endpoint.health.seen(max(reading.found))
        if reading.problem is not None:
            question.failed(endpoint, reading.problem, in_part=bool(reading.found))
        if reading.absent is not None:
            _refuse_past_tip(pool, endpoint, reading.absent)
        left = [number for number in left if number not in found]
    return Fetched([found[number] for number in numbers], size)


def _refuse_past_tip(pool: Pool, endpoint: Endpoint, number: int) -> None:
    """``null`` from an endpoint that lags is asked of the others; past everybody's tip there is nobody to ask."""
    endpoint.health.head = number - 1 if number else None
    known = pool.known_head()
    if known is not None and known >= number:
        return
    try:
        head = pool.head(patient=True)
    except Unavailable:
        return
    if head.number < number:
        raise BlockNotFound(number, f"the newest block is {head.number}, as {head.endpoint} says")


class _Reading:
    """What one endpoint had to say about some blocks. ``absent`` is the first that it doesn't have."""

    def __init__(
        self, pool: Pool, endpoint: Endpoint, question: Question, *, receipts: bool, traces: bool
    ) -> None:
        self._pool = pool
        self._endpoint = endpoint
        self._question = question
        self._receipts = receipts
        self._traces = traces
        self.found: dict[int, RawBlock] = {}
        self.size = 0
        self.problem: Problem | None = None
        self.absent: int | None = None

    def read(self, numbers: Sequence[int]) -> None:
        lacks = self._endpoint.health.missing_now(BLOCK_RECEIPTS)
        by_block = self._receipts and not lacks
        per_block = 1 + by_block + self._traces
        calls: list[Call] = []
        for number in numbers:
            height = hex(number)
            calls.append((BLOCK, (height, True)))
            if by_block:
                calls.append((BLOCK_RECEIPTS, (height,)))
            if self._traces:
                calls.append((TRACES, (height,)))
        outcomes = self._ask(calls, BATCH_KIND)
        blocks: dict[int, dict[str, Any]] = {}
        receipts: dict[int, Outcome] = {}
        traces: dict[int, Outcome] = {}
        for index, number in enumerate(numbers[: len(outcomes) // per_block]):
            answers = iter(outcomes[index * per_block : (index + 1) * per_block])
            block = self._checked_block(number, next(answers))
            if block is not None:
                blocks[number] = block
                receipts[number] = next(answers) if by_block else _NO_BLOCK_RECEIPTS
                traces[number] = next(answers, None)
        if self._receipts:
            self._read_receipts_singly(blocks, receipts)
        for number, block in blocks.items():
            self._put_together(number, block, receipts.get(number), traces[number])

    def _ask(self, calls: Sequence[Call], kind: str) -> list[Outcome]:
        """As many as are answered before something goes wrong with the endpoint as a whole."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(calls):
            size = self._endpoint.batch_size(kind)
            some = calls[len(outcomes) : len(outcomes) + size]
            try:
                answers, received = self._pool.roster.exchange(self._endpoint, some, self._question, kind)
            except Problem as problem:
                self.problem = problem
                break
            outcomes += answers
            self.size += received
        return outcomes

    def _checked_block(self, number: int, outcome: Outcome) -> dict[str, Any] | None:
        if isinstance(outcome, dict):
            if outcome.get("number") == hex(number) or read_quantity(outcome.get("number")) == number:
                if isinstance(outcome.get("transactions"), list) and isinstance(outcome.get("hash"), str):
                    return outcome
                self._note(Kind.GARBLED, f"block {number} without transactions or hash")
            else:
                self._note(Kind.GARBLED, f"another block when asked for block {number}")
        elif outcome is None or (isinstance(outcome, Problem) and outcome.kind is Kind.MISSING):
            self.absent = number if self.absent is None else self.absent
            self._note(Kind.MISSING, f"it has no block {number}")
        else:
            self._note_outcome(outcome, f"block {number}")
        return None

    def _read_receipts_singly(self, blocks: dict[int, dict[str, Any]], receipts: dict[int, Outcome]) -> None:
        lacking = [number for number in blocks if _is_no_method(receipts[number])]
        hashes = [
            transaction.get("hash") if isinstance(transaction, dict) else transaction
            for number in lacking
            for transaction in blocks[number]["transactions"]
        ]
        answers = iter(self._ask([(RECEIPT, (each,)) for each in hashes], RECEIPT))
        for number in lacking:
            count = len(blocks[number]["transactions"])
            some = list(islice(answers, count))
            bad = next((each for each in some if not isinstance(each, dict)), None)
            if len(some) < count:
                receipts[number] = self.problem
            elif bad is not None or any(each is None for each in some):
                receipts[number] = bad
            else:
                receipts[number] = some

    def _put_together(self, number: int, block: dict[str, Any], receipts: Outcome, traces: Outcome) -> None:
        if self._receipts:
            if not isinstance(receipts, list):
                self._note_outcome(receipts, f"receipts of block {number}")
                return
            if (why := _unlike(block, receipts)) is not None:
                self._note(Kind.GARBLED, f"{why} of block {number}")
                return
        if self._traces and not isinstance(traces, list):
            self._note_outcome(traces, f"traces of block {number}")
            return
        self.found[number] = RawBlock(
            number,
            block,
            receipts if self._receipts else None,
            traces if self._traces else None,
            self._endpoint.name,
        )

    def _note_outcome(self, outcome: Outcome, what: str) -> None:
        if isinstance(outcome, Problem):
            self.problem = self.problem or Problem(outcome.kind, f"{what}: {outcome.text}", code=outcome.code)
        elif outcome is None:
            self._note(Kind.MISSING, f"null for {what}")
        else:
            self._note(Kind.GARBLED, f"no {what} but something else")

    def _note(self, kind: Kind, text: str) -> None:
        self.problem = self.problem or Problem(kind, text)


_NO_BLOCK_RECEIPTS = Problem(Kind.NO_METHOD, f"it has no {BLOCK_RECEIPTS}")


def _is_no_method(outcome: Outcome) -> bool:
    return isinstance(outcome, Problem) and outcome.kind is Kind.NO_METHOD


def _unlike(block: dict[str, Any], receipts: list[Any]) -> str | None:
    """What shows at a glance that these receipts aren't this block's. The rest is for verification."""
    expected = len(block["transactions"])
    if len(receipts) != expected:
        return f"{len(receipts)} receipts for the {expected} transactions"
    for receipt in receipts:
        if type(receipt) is not dict:
            return "something else among the receipts"
        if receipt.get("blockHash") != block["hash"]:
            return "receipts of another block in place of those"
    return None
