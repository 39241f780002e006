"""Blocks as an endpoint sent them: parsed JSON, unchecked, with the name of the endpoint, and the errors about
them.

``BlockMismatch`` and ``BlockMalformed`` are an endpoint's fault and prove nothing against the chain, so another
endpoint is asked. A mismatch may pass, as after a reorg, and is retried later too; a malformed block isn't, once
every endpoint has sent it. ``Unprovable`` is nobody's fault: this version, or the chain profile, doesn't know how
the block is encoded, and won't the next time, so it isn't retried. Text that an endpoint sent is shortened to one
printable line before it appears in an error. ``portions`` groups blocks for decoding: a call of the decoder has a
fixed cost, and parsed JSON takes several times the memory of the columns that it becomes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.profiles.profile import ETHEREUM, ChainProfile

PORTION_BLOCKS = 200
PORTION_ITEMS = 20_000
SHORT_TEXT = 200
_LONGEST_MISMATCH = 2000
"""Maximum length of a mismatch, which quotes all endpoints of a pool."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 70


class ChainTable(StrEnum):
    """The tables of a chain, under the names that the field has for them."""

    BLOCKS = "blocks"
    TRANSACTIONS = "transactions"
    LOGS = "logs"
    RECEIPTS = "receipts"
    WITHDRAWALS = "withdrawals"
    TRACES = "traces"


_OF_RECEIPTS = frozenset({ChainTable.TRANSACTIONS, ChainTable.LOGS, ChainTable.RECEIPTS})


class Verify(StrEnum):
    """How much of a block is proven before it is used."""

    FULL = "full"
    BLOOM = "bloom"
    OFF = "off"


class Senders(StrEnum):
    """Whether ``Verify.FULL`` recovers senders from signatures, or uses those that the node gives."""

    DERIVE = "derive"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class RawBlock:
    """``block`` is the result of eth_getBlockByNumber with whole transactions, ``receipts`` of
    eth_getBlockReceipts in the order of the transactions, ``traces`` of trace_block; the latter two are None
    when they weren't requested. ``endpoint`` is a name that is safe to print. ``profile`` has the rules that the
    block is verified and decoded by."""

    number: int
    block: dict[str, Any]
    receipts: list[dict[str, Any]] | None
    traces: list[dict[str, Any]] | None
    endpoint: str
    profile: ChainProfile = ETHEREUM


def same_number(given: str, expected: str) -> bool:
    """Whether two quantities are one number: some clients pad them."""
    return given == expected or int(given, 16) == int(expected, 16)


def same_text(given: str, expected: str) -> bool:
    """Whether two texts are the same bytes: some clients write capitals."""
    return given == expected or given.lower() == expected.lower()


class BlockMismatch(Unavailable):
    """The parts of a block contradict each other."""

    def __init__(self, number: int, endpoint: str, what: str) -> None:
        what = printable(what, _LONGEST_MISMATCH)
        super().__init__("BlockMismatch", f"block {number} from {endpoint}: {what}")
        self.number, self.endpoint, self.what = number, endpoint, what

    def __reduce__(self) -> tuple[type[BlockMismatch], tuple[int, str, str]]:
        return type(self), (self.number, self.endpoint, self.what)


class BlockMalformed(Invalid):
    """A field is missing, or its value isn't valid for a field of its kind. Another endpoint may do better, but
    when all of them answer so, trying again doesn't help."""

    def __init__(self, number: int, endpoint: str, field: str, problem: str) -> None:
        field, problem = printable(field), printable(problem)
        super().__init__("BlockMalformed", f"block {number} from {endpoint}: {field} {problem}")
        self.number, self.endpoint, self.field, self.problem = number, endpoint, field, problem

    def __reduce__(self) -> tuple[type[BlockMalformed], tuple[int, str, str, str]]:
        return type(self), (self.number, self.endpoint, self.field, self.problem)


class Unprovable(Invalid):
    """The encoding of a block isn't known here, so no endpoint's answer about it can be proven in full."""


class UnknownTransactionType(Unprovable):
    """``where`` is the beginning of the message, ``advice`` its end."""

    def __init__(self, kind: str, where: str = "", advice: str = "use verify: bloom here") -> None:
        kind = printable(kind)
        super().__init__(
            "UnknownTransactionType",
            f"{where}transaction type {kind} isn't known, so its hashes can't be checked: {advice}",
        )
        self.kind, self.where, self.advice = kind, where, advice

    def __reduce__(self) -> tuple[type[UnknownTransactionType], tuple[str, str, str]]:
        return type(self), (self.kind, self.where, self.advice)


class BlockUnprovable(Unprovable):
    """The block isn't one that its chain profile can prove. ``why`` also says what to do."""

    def __init__(self, number: int, endpoint: str, why: str) -> None:
        why = printable(why, _LONGEST_MISMATCH)
        super().__init__("BlockUnprovable", f"block {number} from {endpoint}: {why}")
        self.number, self.endpoint, self.why = number, endpoint, why

    def __reduce__(self) -> tuple[type[BlockUnprovable], tuple[int, str, str]]:
        return type(self), (self.number, self.endpoint, self.why)


class UnknownFork(Unprovable):
    """The header's hash covers something that no known fork has."""

    def __init__(self, number: int, endpoint: str, fields: str) -> None:
        fields = printable(fields)
        super().__init__(
            "UnknownFork",
            f"block {number} from {endpoint}: its hash isn't that of its known header fields, and it has {fields}: "
            "newer fork than this version knows; `verify: bloom` works, or upgrade",
        )
        self.number, self.endpoint, self.fields = number, endpoint, fields

    def __reduce__(self) -> tuple[type[UnknownFork], tuple[int, str, str]]:
        return type(self), (self.number, self.endpoint, self.fields)


def need_receipts(datasets: Iterable[ChainTable], verify: Verify = Verify.FULL) -> bool:
    """Whether rows of these tables come from receipts, or are verified by them."""
    wanted = set(datasets)
    checked = ChainTable.TRACES in wanted and verify is not Verify.OFF
    return checked or not _OF_RECEIPTS.isdisjoint(wanted)


def portions(blocks: Iterable[RawBlock]) -> Iterator[list[RawBlock]]:
    """Group blocks in their order. No portion is empty; a block larger than a portion is one by itself."""
    portion: list[RawBlock] = []
    items = 0
    for raw in blocks:
        portion.append(raw)
        items += _items(raw)
        if len(portion) >= PORTION_BLOCKS or items >= PORTION_ITEMS:
            yield portion
            portion, items = [], 0
    if portion:
        yield portion


def _items(raw: RawBlock) -> int:
    """Count what becomes a row. Unverified receipts may have no list of logs; decoding reports that."""
    logs = sum(len(logs) for receipt in raw.receipts or () if type(logs := receipt.get("logs")) is list)
    return len(raw.block["transactions"]) + logs + len(raw.traces or ())


def printable(text: str, most: int = SHORT_TEXT) -> str:
    """Text of an endpoint as one line of at most ``most`` characters."""
    # Cut first: the text may be megabytes long. Line breaks and escapes could forge lines of a log.
    line = "".join(letter if letter.isprintable() else " " for letter in text[: most * 2])
    line = " ".join(line.split())
    return line if len(line) <= most else f"{line[:most]}…"


def shown(value: object) -> str:
    """A short form of any value, however large or deep it is."""
    return _REPR.repr(value)
