"""Blocks from a pool: headers that all endpoints are asked for, and whole blocks from one endpoint after another.

Endpoints differ about the newest blocks more than about anything else, since none is as far as the next. So
``Headers`` asks all of them at once and compares the answers.

``fetch_some`` asks one endpoint for block, receipts and traces in one batch, so that they are of the same block
even while the chain changes. Parts that an endpoint couldn't give are requested from the next; complete blocks
are kept. Without eth_getBlockReceipts, each transaction's receipt is requested, and so is one that the receipts of
a block leave out on a chain where that happens. Blocks aren't proven here, but each has the right number and as
many receipts as transactions, unless its chain profile has transactions without one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from tracelake.domain.errors import Unavailable
from tracelake.evm.profiles.profile import ChainProfile
from tracelake.evm.raw_block import RawBlock, printable
from tracelake.evm.rpc.endpoint import Endpoint
from tracelake.evm.rpc.endpoint_selector import Broadcast, PoolRequest
from tracelake.evm.rpc.errors import (
    BlockNotFound,
    NoQuorum,
    ProblemKind,
    RpcProblem,
    RpcRefused,
    RpcUnavailable,
)
from tracelake.evm.rpc.exchange import RpcCall, RpcOutcome, read_quantity
from tracelake.evm.traces import is_of_block

if TYPE_CHECKING:
    from tracelake.evm.rpc.pool import Pool

Header = dict[str, Any]
BATCH_KIND = "blocks"
BLOCK = "eth_getBlockByNumber"
BLOCK_RECEIPTS = "eth_getBlockReceipts"
RECEIPT = "eth_getTransactionReceipt"
TRACES = "trace_block"
_BY_HASH = "eth_getBlockByHash"
_LATEST: RpcCall = (BLOCK, ("latest", False))
_ROUNDS = 3
_DEEPEST = 1 << 12
"""How far below the head endpoints may disagree until nothing is believed at all."""
_ROUND_SECONDS = 0.2
_COMPARE_SECONDS = 5.0
"""How often an endpoint that is ahead of the agreed head is compared with it, so that a fork of its own shows."""
_NO_HEAD = RpcProblem(ProblemKind.GARBLED, "invalid latest block")
_NO_BLOCK_RECEIPTS = RpcProblem(ProblemKind.NO_METHOD, f"it has no {BLOCK_RECEIPTS}")


@dataclass(frozen=True, slots=True)
class Head:
    """The newest block that an endpoint has. ``endpoint`` is the name of that endpoint, ``timestamp`` the block's
    own, if the endpoint gave one."""

    number: int
    hash: str
    endpoint: str
    timestamp: int | None = field(default=None, compare=False)


class Headers:
    """``dissent`` has the endpoints that weren't part of the last agreement on the newest block, and why;
    ``disputed`` is the block after it, if enough endpoints have one and don't agree on it. Only a pool with a
    quorum has either."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._survey = Broadcast(pool.selector)
        self._quorum = pool.config.quorum
        self.dissent: dict[str, str] = {}
        self.disputed: int | None = None
        self._compared_at = -_COMPARE_SECONDS
        self._compared: tuple[int, dict[str, str | None]] = (-1, {})

    def newest(self, *, patient: bool) -> Head:
        if self._quorum > 1:
            return self._newest_agreed(patient=patient)
        best: Head | None = None
        for endpoint, outcome in self._survey.ask(_LATEST, patient=patient):
            if (found := _head(outcome, endpoint.name)) is None:
                continue
            endpoint.health.head = found.number
            if best is None or found.number > best.number:
                best = found
        return best or self._newest_of_anyone()

    def tagged(self, tag: str) -> int | None:
        """The number of the ``safe`` or ``finalized`` block; None if no endpoint knows the tag."""
        call: RpcCall = (BLOCK, (tag, False))
        # A quorum may need the slow endpoints too.
        answers = self._survey.ask(call, patient=self._quorum > 1)
        heads = [head.number for each, outcome in answers if (head := _head(outcome, each.name)) is not None]
        if len(heads) >= self._quorum:
            # Finality never goes back, so the highest answer is the newest one; with a quorum, the highest that
            # enough endpoints have reached.
            return sorted(heads, reverse=True)[self._quorum - 1]
        # A chain without finality answers by null or by an error, depending on the client.
        if any(_is_none(outcome) or _is_refusal(outcome) for _, outcome in answers):
            return None
        if self._quorum > 1:
            raise NoQuorum(
                f"the {tag} block",
                self._quorum,
                {each.name: _outcome_text(outcome) for each, outcome in answers},
            )
        try:
            found = _head(self._pool.call(*call), "")
        except RpcRefused:
            return None
        return None if found is None else found.number

    def one(self, which: int | str) -> Header | None:
        # A hash is its own proof; a number is what the endpoints make of it.
        if self._quorum > 1 and isinstance(which, int):
            return self._one_agreed(which)
        call: RpcCall = (_BY_HASH, (which, False)) if isinstance(which, str) else (BLOCK, (hex(which), False))
        try:
            if isinstance(first := self._pool.call(*call), dict):
                return first
        except RpcUnavailable:
            # Some endpoints report by an error that there is no such block. The survey below counts that as an
            # answer.
            pass
        for left in range(_ROUNDS, 0, -1):
            answers = [outcome for _, outcome in self._survey.ask(call, patient=True)]
            if (found := next((each for each in answers if isinstance(each, dict)), None)) is not None:
                return found
            denied = sum(_is_none(each) for each in answers)
            # Endpoints that lag or failed get another round before a block counts as absent.
            if denied and (denied == len(answers) or left == 1):
                return None
            self._pool.selector.pause(_ROUND_SECONDS)
        raise self._pool.no_answer(f"block {which}")

    def by_endpoint(self, number: int, *, patient: bool = True) -> dict[str, Header | None]:
        answers = self._survey.ask((BLOCK, (hex(number), False)), patient=patient)
        found = {
            each.name: outcome if isinstance(outcome, dict) else None
            for each, outcome in answers
            if isinstance(outcome, dict) or _is_none(outcome)
        }
        if not found and patient:
            raise self._pool.no_answer(f"block {number}")
        return found

    def _one_agreed(self, number: int) -> Header | None:
        found = self.by_endpoint(number)
        if (agreed := most_agreed(_hashes(found), self._quorum)) is not None:
            return next(header for header in found.values() if header and header["hash"] == agreed)
        if sum(header is None for header in found.values()) >= self._quorum:
            return None
        raise NoQuorum(f"block {number}", self._quorum, _views(_hashes(found)))

    def _newest_agreed(self, *, patient: bool) -> Head:
        """The highest block that enough endpoints have alike."""
        heads = self._heads(patient=patient)
        if len(heads) < self._quorum:
            # Slow endpoints are waited for: without them there is no agreement.
            heads = self._heads(patient=True)
        if len(heads) < self._quorum:
            raise NoQuorum(
                "the newest block", self._quorum, {head.endpoint: f"is at {head.number}" for head in heads}
            )
        top = sorted((head.number for head in heads), reverse=True)[self._quorum - 1]
        number, seen = self._highest_agreed(top, heads)
        agreed = seen[number]
        self._note_dissent(heads, number, seen)
        within = [name for name, own in agreed.items() if own == most_agreed(agreed, self._quorum)]
        furthest = max((head for head in heads if head.endpoint in within), key=lambda head: head.number)
        own_hash = agreed[furthest.endpoint]
        assert own_hash is not None
        return Head(
            number, own_hash, furthest.endpoint, furthest.timestamp if furthest.number == number else None
        )

    def _heads(self, *, patient: bool) -> list[Head]:
        found = []
        for endpoint, outcome in self._survey.ask(_LATEST, patient=patient):
            if (head := _head(outcome, endpoint.name)) is not None:
                endpoint.health.head = head.number
                found.append(head)
        return found

    def _highest_agreed(
        self, top: int, heads: Sequence[Head]
    ) -> tuple[int, dict[int, dict[str, str | None]]]:
        """The highest height up to ``top`` at which enough endpoints agree, and the hash of each at the heights
        that were compared. Endpoints that agree on a block agree on all below, so steps that double find it."""
        # At the tip most of them have the same head, and nobody needs to be asked again.
        seen: dict[int, dict[str, str | None]] = {
            top: {head.endpoint: head.hash for head in heads if head.number == top}
        }

        def agree(number: int) -> bool:
            # Slow endpoints are waited for only if the others aren't enough.
            for patient in (None, False, True):
                if patient is not None:
                    seen[number] = _hashes(self.by_endpoint(number, patient=patient))
                if most_agreed(seen.get(number, {}), self._quorum) is not None:
                    return True
            return False

        step, below, above = 1, top, top + 1
        while not agree(below):
            if below == 0 or step > _DEEPEST:
                raise NoQuorum(f"block {top}", self._quorum, _views(seen[top]))
            above, below, step = below, max(0, top - step), step * 2
        while above - below > 1:
            middle = (above + below) // 2
            below, above = (middle, above) if agree(middle) else (below, middle)
        return below, seen

    def _note_dissent(
        self, heads: Sequence[Head], number: int, seen: Mapping[int, Mapping[str, str | None]]
    ) -> None:
        """Who isn't part of the agreement on block ``number``. One that is ahead is asked about it now and then."""
        at = {head.endpoint: head.number for head in heads}
        found, newest, now = dict(seen[number]), max(at.values()), time.monotonic()
        if any(name not in found for name in at) and now - self._compared_at >= _COMPARE_SECONDS:
            self._compared_at = now
            found |= _hashes(self.by_endpoint(number, patient=False))
            self._compared = (number, found)
        elif self._compared[0] == number:
            found = {**self._compared[1], **found}
        agreed = most_agreed(found, self._quorum)
        dissent = {}
        for endpoint in self._pool.selector.endpoints:
            name, own = endpoint.name, found.get(endpoint.name)
            if own is not None and own != agreed:
                dissent[name] = f"has block {number} as {printable(own)}"
            elif name in at and at[name] < number:
                dissent[name] = f"is {newest - at[name]} blocks behind"
            elif name not in at:
                dissent[name] = endpoint.left_out or "doesn't answer"
        above = seen.get(number + 1)
        self.disputed = (
            number + 1 if above is not None and sum(map(bool, above.values())) >= self._quorum else None
        )
        if self.disputed is not None and above is not None:
            own_blocks = {name: f"has block {number + 1} as {view}" for name, view in _views(above).items()}
            dissent = own_blocks | dissent
        self.dissent = dissent

    def _newest_of_anyone(self) -> Head:
        """No usable endpoint had an answer: go on asking until the deadline."""
        selector, question = self._pool.selector, self._pool.question("the newest block")
        while True:
            with selector.ask(question, 1) as endpoint:
                try:
                    outcomes, _ = selector.exchange(endpoint, [_LATEST], question, "single")
                    if (found := _head(outcomes[0], endpoint.name)) is not None:
                        endpoint.health.head = found.number
                        return found
                    problem = outcomes[0] if isinstance(outcomes[0], RpcProblem) else _NO_HEAD
                except RpcProblem as raised:
                    problem = raised
            question.failed(endpoint, problem)


def most_agreed(hashes: Mapping[str, str | None], quorum: int) -> str | None:
    """The hash that the most endpoints have, if these are enough."""
    ranked = Counter(each for each in hashes.values() if each is not None).most_common(1)
    return ranked[0][0] if ranked and ranked[0][1] >= quorum else None


def _hashes(headers: Mapping[str, Header | None]) -> dict[str, str | None]:
    """The hash of each endpoint's block; one without a usable hash has none."""
    return {
        name: own if header is not None and isinstance(own := header.get("hash"), str) else None
        for name, header in headers.items()
    }


def _views(hashes: Mapping[str, str | None]) -> dict[str, str]:
    return {name: printable(own) if own is not None else "doesn't have it" for name, own in hashes.items()}


def _outcome_text(outcome: RpcOutcome) -> str:
    if isinstance(outcome, RpcProblem):
        return outcome.text
    found = _head(outcome, "")
    return "gave no block" if found is None else f"has {found.number}"


def _head(outcome: RpcOutcome, endpoint: str) -> Head | None:
    if not isinstance(outcome, dict):
        return None
    number, own_hash = read_quantity(outcome.get("number")), outcome.get("hash")
    if number is None or not isinstance(own_hash, str):
        return None
    return Head(number, own_hash, endpoint, read_quantity(outcome.get("timestamp")))


def _is_none(outcome: RpcOutcome) -> bool:
    """Whether an endpoint reported by ``null`` or by an error that there is no such block."""
    return outcome is None or (isinstance(outcome, RpcProblem) and outcome.kind is ProblemKind.MISSING)


def _is_refusal(outcome: RpcOutcome) -> bool:
    return isinstance(outcome, RpcProblem) and outcome.kind is ProblemKind.REFUSED


@dataclass(frozen=True, slots=True)
class FetchedBlocks:
    """``size`` is the number of bytes received."""

    blocks: list[RawBlock]
    size: int


def fetch_some(
    pool: Pool, numbers: Sequence[int], *, receipts: bool, traces: bool, avoid: Iterable[str] = ()
) -> FetchedBlocks:
    if not numbers:
        return FetchedBlocks([], 0)
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
        with pool.selector.ask(question, len(left) * (1 + receipts + traces)) as endpoint:
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
    return FetchedBlocks([found[number] for number in numbers], size)


def _refuse_past_tip(pool: Pool, endpoint: Endpoint, number: int) -> None:
    """Raise ``BlockNotFound`` past the head of all endpoints; a lagging endpoint's ``null`` goes on to the
    others."""
    # The answer refutes what was known of this endpoint's head.
    endpoint.health.head = number - 1 if number else None
    known = pool.known_head()
    # Another endpoint has the block, so it is asked next.
    if known is not None and known >= number:
        return
    try:
        head = pool.head(patient=True)
    except Unavailable:
        return
    if head.number < number:
        raise BlockNotFound(number, f"the newest block is {head.number}, as {head.endpoint} says")


class _Reading:
    """The answers of one endpoint about some blocks. ``absent`` is the first block that it doesn't have."""

    def __init__(
        self, pool: Pool, endpoint: Endpoint, question: PoolRequest, *, receipts: bool, traces: bool
    ) -> None:
        self._pool = pool
        self._endpoint = endpoint
        self._question = question
        self._receipts = receipts
        self._traces = traces
        self._profile = pool.profile
        self.found: dict[int, RawBlock] = {}
        self.size = 0
        self.problem: RpcProblem | None = None
        self.absent: int | None = None

    def read(self, numbers: Sequence[int]) -> None:
        lacks = self._endpoint.health.missing_now(BLOCK_RECEIPTS)
        by_block = self._receipts and not lacks
        per_block = 1 + by_block + self._traces
        calls: list[RpcCall] = []
        for number in numbers:
            height = hex(number)
            calls.append((BLOCK, (height, True)))
            if by_block:
                calls.append((BLOCK_RECEIPTS, (height,)))
            if self._traces:
                calls.append((TRACES, (height,)))
        outcomes = self._ask(calls, BATCH_KIND)
        blocks: dict[int, dict[str, Any]] = {}
        receipts: dict[int, RpcOutcome] = {}
        traces: dict[int, RpcOutcome] = {}
        # A failed batch may have cut the answers off: only blocks with all their parts are used.
        for index, number in enumerate(numbers[: len(outcomes) // per_block]):
            answers = iter(outcomes[index * per_block : (index + 1) * per_block])
            block = self._checked_block(number, next(answers))
            if block is not None:
                blocks[number] = block
                receipts[number] = next(answers) if by_block else _NO_BLOCK_RECEIPTS
                traces[number] = next(answers, None)
        if self._receipts:
            self._read_receipts_singly(blocks, receipts)
            if self._profile.may_lack_receipts:
                self._read_left_out(blocks, receipts)
        for number, block in blocks.items():
            self._put_together(number, block, receipts.get(number), traces[number])

    def _ask(self, calls: Sequence[RpcCall], kind: str) -> list[RpcOutcome]:
        """Outcomes of calls, up to the first batch that fails as a whole."""
        outcomes: list[RpcOutcome] = []
        while len(outcomes) < len(calls):
            size = self._endpoint.batch_size(kind)
            some = calls[len(outcomes) : len(outcomes) + size]
            try:
                answers, received = self._pool.selector.exchange(self._endpoint, some, self._question, kind)
            except RpcProblem as problem:
                self.problem = problem
                break
            outcomes += answers
            self.size += received
        return outcomes

    def _checked_block(self, number: int, outcome: RpcOutcome) -> dict[str, Any] | None:
        if isinstance(outcome, dict):
            # The comparison of text is the common case; some clients pad numbers.
            if outcome.get("number") == hex(number) or read_quantity(outcome.get("number")) == number:
                if isinstance(outcome.get("transactions"), list) and isinstance(outcome.get("hash"), str):
                    return outcome
                self._note(ProblemKind.GARBLED, f"block {number} without transactions or hash")
            else:
                self._note(ProblemKind.GARBLED, f"returned another block for block {number}")
        elif outcome is None or (isinstance(outcome, RpcProblem) and outcome.kind is ProblemKind.MISSING):
            self.absent = number if self.absent is None else self.absent
            self._note(ProblemKind.MISSING, f"it has no block {number}")
        else:
            self._note_outcome(outcome, f"block {number}")
        return None

    def _read_receipts_singly(
        self, blocks: dict[int, dict[str, Any]], receipts: dict[int, RpcOutcome]
    ) -> None:
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
            may_lack = _outside_roots(self._profile, blocks[number])
            there = [each for place, each in enumerate(some) if each is not None or place not in may_lack]
            bad = next((each for each in there if not isinstance(each, dict)), None)
            if len(some) < count:
                receipts[number] = self.problem
            elif bad is not None or any(each is None for each in there):
                receipts[number] = bad
            else:
                receipts[number] = there

    def _read_left_out(self, blocks: dict[int, dict[str, Any]], receipts: dict[int, RpcOutcome]) -> None:
        """Request the receipts that some endpoints leave out of a block's. A receipt that the endpoint doesn't
        have stays out."""
        left_out = [
            (number, tx_hash)
            for number, block in blocks.items()
            if isinstance(given := receipts[number], list)
            for tx_hash in _left_out(self._profile, block, given)
        ]
        answers = self._ask([(RECEIPT, (tx_hash,)) for _, tx_hash in left_out], RECEIPT)
        for place, (number, _) in enumerate(left_out):
            answer = answers[place] if place < len(answers) else self.problem
            given = receipts[number]
            if isinstance(answer, dict) and isinstance(given, list):
                receipts[number] = _in_order(blocks[number], [*given, answer])
            elif not (_is_none(answer) or _is_no_method(answer)):
                receipts[number] = answer

    def _put_together(
        self, number: int, block: dict[str, Any], receipts: RpcOutcome, traces: RpcOutcome
    ) -> None:
        if self._receipts:
            if not isinstance(receipts, list):
                self._note_outcome(receipts, f"receipts of block {number}")
                return
            if (why := _unlike(self._profile, block, receipts)) is not None:
                self._note(ProblemKind.GARBLED, f"{why} of block {number}")
                return
        if self._traces:
            if not isinstance(traces, list):
                self._note_outcome(traces, f"traces of block {number}")
                return
            # A reorg between two calls of a batch gives traces of another block at the same height.
            if not all(type(each) is dict and is_of_block(each, block["hash"]) for each in traces):
                self._note(ProblemKind.GARBLED, f"traces of another block for block {number}")
                return
        self.found[number] = RawBlock(
            number,
            block,
            receipts if self._receipts else None,
            traces if self._traces else None,
            self._endpoint.name,
            self._profile,
        )

    def _note_outcome(self, outcome: RpcOutcome, what: str) -> None:
        if isinstance(outcome, RpcProblem):
            self.problem = self.problem or RpcProblem(
                outcome.kind, f"{what}: {outcome.text}", code=outcome.code
            )
        elif outcome is None:
            self._note(ProblemKind.MISSING, f"null for {what}")
        else:
            self._note(ProblemKind.GARBLED, f"invalid value for {what}")

    def _note(self, kind: ProblemKind, text: str) -> None:
        # The first problem is kept: later ones often follow from it.
        self.problem = self.problem or RpcProblem(kind, text)


def _is_no_method(outcome: RpcOutcome) -> bool:
    return isinstance(outcome, RpcProblem) and outcome.kind is ProblemKind.NO_METHOD


def _outside_roots(profile: ChainProfile, block: dict[str, Any]) -> set[int]:
    """The places of transactions that may have no receipt. Verification reports a block that can't be read."""
    if not profile.may_lack_receipts:
        return set()
    try:
        return set(profile.places_outside_roots(block))
    except (KeyError, TypeError, ValueError, AttributeError):
        return set()


def _left_out(profile: ChainProfile, block: dict[str, Any], receipts: list[Any]) -> list[str]:
    """The hashes of transactions whose receipts aren't there and may be missing."""
    transactions = block["transactions"]
    if len(receipts) >= len(transactions):
        return []
    given = {receipt.get("transactionHash") for receipt in receipts if isinstance(receipt, dict)}
    hashes = [transactions[place]["hash"] for place in sorted(_outside_roots(profile, block))]
    return [tx_hash for tx_hash in hashes if tx_hash not in given]


def _in_order(block: dict[str, Any], receipts: list[Any]) -> list[Any]:
    places = {tx["hash"]: place for place, tx in enumerate(block["transactions"])}
    return sorted(receipts, key=lambda receipt: places.get(receipt.get("transactionHash"), len(places)))


def _unlike(profile: ChainProfile, block: dict[str, Any], receipts: list[Any]) -> str | None:
    """A cheap check that receipts are of this block; the rest is left to verification."""
    expected = len(block["transactions"])
    if len(receipts) != expected and len(receipts) + len(_left_out(profile, block, receipts)) != expected:
        return f"{len(receipts)} receipts for the {expected} transactions"
    for receipt in receipts:
        if type(receipt) is not dict:
            return "a receipt is not an object"
        # A reorg between two calls of a batch gives receipts of another block at the same height.
        if receipt.get("blockHash") != block["hash"]:
            return "receipts of another block"
    return None
