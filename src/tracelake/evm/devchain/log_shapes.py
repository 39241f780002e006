"""The logs of a dev chain: token traffic for the most part, and between it all that trips decoders.

Shapes rotate instead of being drawn, so that any stretch of ``len(SHAPES)`` logs has every one of them: the two
kinds of ``Transfer`` that only their number of topics tells apart, the same topic with other indexed arguments,
amounts up to 2^256 − 1, logs without topics, without data, and with a lot of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tracelake.evm.devchain.cast import Cast
from tracelake.evm.devchain.dice import Dice
from tracelake.evm.keccak import keccak256


def topic0(signature: str) -> str:
    return "0x" + keccak256(signature.encode()).hex()


TRANSFER = topic0("Transfer(address,address,uint256)")
APPROVAL = topic0("Approval(address,address,uint256)")
APPROVAL_FOR_ALL = topic0("ApprovalForAll(address,address,bool)")
SWAP = topic0("Swap(address,uint256,uint256,uint256,uint256,address)")
MESSAGE = topic0("Message(bytes)")
PAUSED = topic0("Paused()")

MOST = 2**256 - 1
HUGE_DATA = 24 * 1024
_ZERO = "0x" + "00" * 32


@dataclass(frozen=True, slots=True)
class Log:
    """What a contract says; where it stands in its block is added by whoever knows that."""

    address: str
    topics: tuple[str, ...]
    data: str


Shape = Callable[[Dice, Cast], Log]


def word(value: int) -> str:
    """One ABI word as hex digits, without a prefix."""
    return f"{value:064x}"


def padded(address: str) -> str:
    """An address as a topic."""
    return "0x" + "00" * 12 + address[2:]


def _amount(dice: Dice) -> int:
    return dice.bits(dice.between(1, 90))


def _coin_event(topic: str, first: str, second: str, amount: int, dice: Dice, cast: Cast) -> Log:
    return Log(cast.coins[dice.below(len(cast.coins))], (topic, first, second), "0x" + word(amount))


def _collection_event(topic: str, first: str, second: str, dice: Dice, cast: Cast) -> Log:
    token_id = "0x" + word(dice.below(10_000))
    return Log(cast.collections[dice.below(len(cast.collections))], (topic, first, second, token_id), "0x")


def _someone(dice: Dice, cast: Cast) -> str:
    return padded(cast.account(dice))


def coin_transfer(dice: Dice, cast: Cast) -> Log:
    return _coin_event(TRANSFER, _someone(dice, cast), _someone(dice, cast), _amount(dice), dice, cast)


def coin_mint(dice: Dice, cast: Cast) -> Log:
    return _coin_event(TRANSFER, _ZERO, _someone(dice, cast), _amount(dice), dice, cast)


def coin_burn(dice: Dice, cast: Cast) -> Log:
    return _coin_event(TRANSFER, _someone(dice, cast), _ZERO, _amount(dice), dice, cast)


def largest_transfer(dice: Dice, cast: Cast) -> Log:
    return _coin_event(TRANSFER, _someone(dice, cast), _someone(dice, cast), MOST, dice, cast)


def huge_transfer(dice: Dice, cast: Cast) -> Log:
    amount = MOST - dice.below(1000)
    return _coin_event(TRANSFER, _someone(dice, cast), _someone(dice, cast), amount, dice, cast)


def coin_approval(dice: Dice, cast: Cast) -> Log:
    amount = MOST if dice.below(2) else _amount(dice)
    return _coin_event(APPROVAL, _someone(dice, cast), _someone(dice, cast), amount, dice, cast)


def collection_transfer(dice: Dice, cast: Cast) -> Log:
    return _collection_event(TRANSFER, _someone(dice, cast), _someone(dice, cast), dice, cast)


def collection_mint(dice: Dice, cast: Cast) -> Log:
    return _collection_event(TRANSFER, _ZERO, _someone(dice, cast), dice, cast)


def collection_burn(dice: Dice, cast: Cast) -> Log:
    return _collection_event(TRANSFER, _someone(dice, cast), _ZERO, dice, cast)


def collection_approval(dice: Dice, cast: Cast) -> Log:
    return _collection_event(APPROVAL, _someone(dice, cast), _someone(dice, cast), dice, cast)


def approval_for_all(dice: Dice, cast: Cast) -> Log:
    topics = (APPROVAL_FOR_ALL, _someone(dice, cast), _someone(dice, cast))
    return Log(cast.collections[dice.below(len(cast.collections))], topics, "0x" + word(dice.below(2)))


def swap(dice: Dice, cast: Cast) -> Log:
    amounts = "".join(word(_amount(dice)) for _ in range(4))
    return Log(cast.others[0], (SWAP, _someone(dice, cast), _someone(dice, cast)), "0x" + amounts)


def unindexed_transfer(dice: Dice, cast: Cast) -> Log:
    """Tokens from before ``indexed`` was usual: the topic of a transfer, and all its arguments in the data."""
    arguments = _someone(dice, cast)[2:] + _someone(dice, cast)[2:] + word(_amount(dice))
    return Log(cast.others[1], (TRANSFER,), "0x" + arguments)


def half_indexed_transfer(dice: Dice, cast: Cast) -> Log:
    arguments = _someone(dice, cast)[2:] + word(_amount(dice))
    return Log(cast.others[1], (TRANSFER, _someone(dice, cast)), "0x" + arguments)


def anonymous(dice: Dice, cast: Cast) -> Log:
    return Log(cast.others[2], (), dice.hex(dice.below(97)))


def signal(dice: Dice, cast: Cast) -> Log:
    return Log(cast.others[3], (PAUSED,), "0x")


def message(dice: Dice, cast: Cast) -> Log:
    """Some are as large as a log gets in practice."""
    size = HUGE_DATA if dice.below(64) == 0 else dice.below(200)
    text = dice.bytes(size).hex()
    return Log(cast.others[4], (MESSAGE,), "0x" + word(32) + word(size) + text + "00" * (-size % 32))


SHAPES: tuple[Shape, ...] = (
    coin_transfer,
    coin_transfer,
    collection_transfer,
    coin_transfer,
    coin_mint,
    anonymous,
    coin_transfer,
    coin_approval,
    largest_transfer,
    coin_transfer,
    collection_mint,
    unindexed_transfer,
    coin_transfer,
    swap,
    coin_transfer,
    signal,
    collection_approval,
    coin_transfer,
    coin_burn,
    half_indexed_transfer,
    coin_transfer,
    huge_transfer,
    collection_transfer,
    coin_transfer,
    message,
    coin_transfer,
    collection_burn,
    approval_for_all,
    coin_transfer,
)


def log_of(height: int, position: int, dice: Dice, cast: Cast) -> Log:
    """The log at ``position`` in the block at ``height``."""
    return SHAPES[(height * 5 + position) % len(SHAPES)](dice, cast)
