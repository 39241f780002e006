"""Fork rules: what each fork of Ethereum changed about a block, and when it became active on which chain.

Only what a reader of blocks notices is here. A fork appends fields to the header, and never removes any; so a
header's own fields name its fork, and since the block's hash covers them, no endpoint can claim another one.
``fork_of`` refuses combinations that no fork has: a field of a later fork that isn't part of the hashed header
would be an invention. A chain's schedule says what to expect of a block by its height and time: it explains a hash
that doesn't match, and never overrules one that does, since private chains use the ids of public ones.

A new fork is one entry of ``FORKS``, and one of each chain's schedule once its time is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

JsonMapping = Mapping[str, Any]


class Contradiction(Exception):
    """Two parts of a block disagree. The text is a clause that follows the block and the endpoint."""


class Fork(IntEnum):
    """Forks in their order. Those that changed nothing about the form of a block aren't here."""

    FRONTIER = 0
    BYZANTIUM = 1
    BERLIN = 2
    LONDON = 3
    PARIS = 4
    SHANGHAI = 5
    CANCUN = 6
    PRAGUE = 7
    OSAKA = 8
    AMSTERDAM = 9

    @property
    def title(self) -> str:
        return self.name.capitalize()


@dataclass(frozen=True, slots=True)
class ForkRules:
    """``header`` are the fields that the fork appends to the header, and whether each is a number.
    ``transaction_type`` is the type that it adds."""

    fork: Fork
    about: str
    header: tuple[tuple[str, bool], ...] = ()
    transaction_type: int | None = None


FORKS: tuple[ForkRules, ...] = (
    ForkRules(Fork.FRONTIER, "the first day: receipts have the state's root", transaction_type=0),
    ForkRules(Fork.BYZANTIUM, "receipts have a status in place of the root"),
    ForkRules(Fork.BERLIN, "typed transactions, access lists", transaction_type=1),
    ForkRules(Fork.LONDON, "base fee", (("baseFeePerGas", True),), transaction_type=2),
    ForkRules(Fork.PARIS, "the Merge: no difficulty, no uncles"),
    ForkRules(Fork.SHANGHAI, "withdrawals", (("withdrawalsRoot", False),)),
    ForkRules(
        Fork.CANCUN,
        "blobs, the beacon block's root",
        (("blobGasUsed", True), ("excessBlobGas", True), ("parentBeaconBlockRoot", False)),
        transaction_type=3,
    ),
    ForkRules(Fork.PRAGUE, "execution requests", (("requestsHash", False),), transaction_type=4),
    ForkRules(Fork.OSAKA, "nothing that a block shows"),
    ForkRules(
        Fork.AMSTERDAM,
        "block access lists (EIP-7928) and slot numbers (EIP-7843); the block's gas isn't the sum of its "
        "transactions' (EIP-7778, EIP-8037); transfers of ether make logs (EIP-7708)",
        (("blockAccessListHash", False), ("slotNumber", True)),
    ),
)
NEWEST = FORKS[-1].fork
LATER_FIELDS: tuple[tuple[str, bool], ...] = tuple(field for rules in FORKS for field in rules.header)
"""Header fields that forks have appended, in the order in which they are hashed."""


@dataclass(frozen=True, slots=True)
class ForkStart:
    """A fork's first block: by its number until the Merge, by its time since Shanghai."""

    fork: Fork
    block: int | None = None
    time: int | None = None

    def reached(self, number: int, time: int) -> bool:
        if self.block is not None:
            return number >= self.block
        return self.time is not None and time >= self.time


def _schedule(*starts: tuple[Fork, int], shanghai: int, cancun: int, prague: int, osaka: int) -> Schedule:
    by_time = ((Fork.SHANGHAI, shanghai), (Fork.CANCUN, cancun), (Fork.PRAGUE, prague), (Fork.OSAKA, osaka))
    return (
        *(ForkStart(fork, block=block) for fork, block in starts),
        *(ForkStart(fork, time=time) for fork, time in by_time),
    )


Schedule = tuple[ForkStart, ...]
SCHEDULES: Mapping[int, Schedule] = {
    1: _schedule(  # Ethereum
        (Fork.FRONTIER, 0),
        (Fork.BYZANTIUM, 4_370_000),
        (Fork.BERLIN, 12_244_000),
        (Fork.LONDON, 12_965_000),
        (Fork.PARIS, 15_537_394),
        shanghai=1_681_338_455,
        cancun=1_710_338_135,
        prague=1_746_612_311,
        osaka=1_764_798_551,
    ),
    11_155_111: _schedule(  # Sepolia; Amsterdam since 2026-10-06, known by its fields
        (Fork.LONDON, 0),
        (Fork.PARIS, 1_450_409),
        shanghai=1_677_557_088,
        cancun=1_706_655_072,
        prague=1_741_159_776,
        osaka=1_760_427_360,
    ),
    17_000: _schedule(  # Holesky
        (Fork.PARIS, 0),
        shanghai=1_696_000_704,
        cancun=1_707_305_664,
        prague=1_740_434_112,
        osaka=1_759_308_480,
    ),
    560_048: _schedule(  # Hoodi
        (Fork.PARIS, 0), shanghai=0, cancun=0, prague=1_742_999_832, osaka=1_761_677_592
    ),
}
_FIELDS_UP_TO: Mapping[Fork, int] = {
    rules.fork: sum(len(each.header) for each in FORKS[: rules.fork + 1]) for rules in FORKS
}
_FORK_WITH: Mapping[int, Fork] = {
    # The last of the forks with this number of fields: those without a field of their own look alike.
    count: fork
    for fork, count in _FIELDS_UP_TO.items()
}
_OWNER: Mapping[str, Fork] = {name: rules.fork for rules in FORKS for name, _ in rules.header}


def fork_of(block: JsonMapping) -> Fork:
    """The latest fork that has exactly the header's fields."""
    count = _count_of_later_fields(block)
    fork = _FORK_WITH.get(count)
    if fork is None:
        last, next_one = LATER_FIELDS[count - 1][0], LATER_FIELDS[count][0]
        raise Contradiction(f"the header ends with {last} and lacks {next_one}: no fork has that")
    return fork


def missing_fields(block: JsonMapping, chain_id: int | None) -> tuple[Fork, list[str]] | None:
    """The fork that the chain's schedule has for a block, and the fields that the header lacks for it; None if it
    has them all, or if there is no schedule. An endpoint whose software is older than a fork leaves them out."""
    schedule = None if chain_id is None else SCHEDULES.get(chain_id)
    if schedule is None:
        return None
    due = scheduled(schedule, int(block["number"], 16), int(block["timestamp"], 16))
    lacking = [name for name, _ in LATER_FIELDS[: _FIELDS_UP_TO[due]] if block.get(name) is None]
    return (due, lacking) if lacking else None


def scheduled(schedule: Schedule, number: int, time: int) -> Fork:
    due = schedule[0].fork
    for start in schedule:
        if start.reached(number, time):
            due = start.fork
    return due


def fork_named(name: str) -> Fork | None:
    return Fork.__members__.get(name.upper())


def _count_of_later_fields(block: JsonMapping) -> int:
    """The number of later fields, which must be there without a gap."""
    count = 0
    for name, _ in LATER_FIELDS:
        if block.get(name) is None:
            break
        count += 1
    for name, _ in LATER_FIELDS[count + 1 :]:
        if block.get(name) is not None:
            raise Contradiction(
                f"the header has {name} of {_OWNER[name].title} without {LATER_FIELDS[count][0]}: no fork has that"
            )
    return count


_WITH_A_BLOCK = frozenset(
    {
        *("parentHash", "sha3Uncles", "miner", "stateRoot", "transactionsRoot", "receiptsRoot", "logsBloom"),
        *("difficulty", "number", "gasLimit", "gasUsed", "timestamp", "extraData", "mixHash", "nonce"),
        *(name for name, _ in LATER_FIELDS),
        # Not of the header: what JSON-RPC says about the block, and what clients have added to that.
        *("hash", "size", "totalDifficulty", "transactions", "uncles", "withdrawals", "author", "sealFields"),
        *("l1BlockNumber", "sendCount", "sendRoot", "milliTimestamp"),
    }
)


def unknown_fields(block: JsonMapping) -> list[str]:
    """The names in a block that no fork and no client is known to have."""
    return sorted(name for name in block if name not in _WITH_A_BLOCK)
