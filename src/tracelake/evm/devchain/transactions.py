"""The transactions of a dev chain, of every type that there is, as a node tells them.

Type and purpose rotate by height and position, with periods that have no common divisor, so that a short chain
has every combination. What a transaction says doesn't depend on the block that holds it: after a reorg many of
the old ones are in the new blocks too, under the same hash, as on a real chain.

Signatures are random numbers of the right form and don't recover to ``from``; nonces rise with the height and
leave gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tracelake.evm import rlp
from tracelake.evm.consensus import transaction_bytes
from tracelake.evm.devchain.cast import Cast, cast_of
from tracelake.evm.devchain.dice import Dice
from tracelake.evm.devchain.log_shapes import MOST
from tracelake.evm.devchain.profile import Profile
from tracelake.evm.keccak import keccak256

BLOB_GAS = 131_072
GIANT_GAS = 5_000_000_000
_SPREAD = 13
_SLOTS = 4_096
# Blobs beyond the target would raise the next block's price; so few transactions carry one that none does.
_MOST_BLOBS = 6
_KINDS = ("dynamic", "legacy", "dynamic", "access", "blob", "dynamic", "authorization", "frontier")
_BLOB_PLACES = _MOST_BLOBS * len(_KINDS)
_TYPES = {"frontier": 0, "legacy": 0, "access": 1, "dynamic": 2, "blob": 3, "authorization": 4}


class Purpose(Enum):
    CALL = "call"
    PAY = "pay"
    CREATE = "create"
    FAIL = "fail"
    GIANT = "giant"


_PURPOSES = (
    Purpose.CALL,
    Purpose.CALL,
    Purpose.PAY,
    Purpose.CALL,
    Purpose.FAIL,
    Purpose.CALL,
    Purpose.CREATE,
    Purpose.CALL,
    Purpose.GIANT,
    Purpose.CALL,
    Purpose.CALL,
)


@dataclass(frozen=True, slots=True)
class Signed:
    """``fields`` lack only what depends on the block. ``encoded`` is what the transactions root is made of."""

    purpose: Purpose
    fields: dict[str, Any]
    encoded: bytes
    hash: str
    creates: str | None
    priority: int
    fee_cap: int


def transaction_at(profile: Profile, fork: int, height: int, position: int) -> Signed:
    turn = height * _SPREAD + position
    dice = Dice(profile.seed, "transaction", fork, height, position)
    cast = cast_of(profile.seed)
    kind = "frontier" if height < profile.frontier else _KINDS[turn % len(_KINDS)]
    if kind == "blob" and position >= _BLOB_PLACES:
        kind = "dynamic"
    purpose = _PURPOSES[turn % len(_PURPOSES)]
    if purpose is Purpose.CREATE and kind in ("blob", "authorization"):
        purpose = Purpose.CALL
    fields = _core(purpose, height, position, dice, cast)
    fields["type"] = hex(_TYPES[kind])
    priority, fee_cap = _fees(kind, fields, dice)
    _extras(kind, fields, profile.chain_id, dice, cast)
    _sign(kind, fields, profile.chain_id, dice)
    encoded = transaction_bytes(fields)
    fields["hash"] = "0x" + keccak256(encoded).hex()
    creates = _created(fields) if purpose is Purpose.CREATE else None
    return Signed(purpose, fields, encoded, fields["hash"], creates, priority, fee_cap)


def _core(purpose: Purpose, height: int, position: int, dice: Dice, cast: Cast) -> dict[str, Any]:
    match purpose:
        case Purpose.CREATE:
            to, value, data, gas = None, 0, dice.hex(dice.between(32, 200)), 3_000_000
        case Purpose.PAY:
            # The largest value that fits comes up often enough to be met in a short chain.
            amount = MOST - dice.below(2) if dice.below(4) == 0 else dice.bits(dice.between(1, 80))
            to, value, data, gas = cast.account(dice), amount, "0x", 21_000
        case _:
            coin = cast.coins[dice.below(len(cast.coins))]
            gas = GIANT_GAS * 2 if purpose is Purpose.GIANT else dice.between(100_000, 5_000_000)
            to, value, data = coin, 0, "0xa9059cbb" + dice.bytes(64).hex()
    return {
        "from": cast.account(dice),
        "to": to,
        "nonce": hex(height * _SLOTS + position),
        "gas": hex(gas),
        "value": hex(value),
        "input": data,
    }


def _fees(kind: str, fields: dict[str, Any], dice: Dice) -> tuple[int, int]:
    """What the sender would pay at most, and on top of the base fee; the base fee is always below the former."""
    priority = dice.below(3_000_000_000)
    cap = 100_000_000_000 + dice.below(1_000_000_000)
    if kind in ("frontier", "legacy", "access"):
        fields["gasPrice"] = hex(cap)
        return cap, cap
    fields["maxPriorityFeePerGas"] = hex(priority)
    fields["maxFeePerGas"] = hex(cap)
    return priority, cap


def _extras(kind: str, fields: dict[str, Any], chain_id: int, dice: Dice, cast: Cast) -> None:
    if kind != "frontier":
        fields["chainId"] = hex(chain_id)
    if _TYPES[kind] >= 1:
        fields["accessList"] = [
            {
                "address": cast.account(dice),
                "storageKeys": [dice.hex(32) for _ in range(dice.below(3))],
            }
            for _ in range(dice.below(3))
        ]
    if kind == "blob":
        fields["maxFeePerBlobGas"] = hex(dice.bits(34))
        fields["blobVersionedHashes"] = ["0x01" + dice.bytes(31).hex()]
    if kind == "authorization":
        fields["authorizationList"] = [
            {
                "chainId": hex(chain_id if dice.below(2) else 0),
                "address": cast.others[dice.below(len(cast.others))],
                "nonce": hex(dice.below(1000)),
                "yParity": hex(dice.below(2)),
                "r": hex(dice.bits(255)),
                "s": hex(dice.bits(254)),
            }
            for _ in range(dice.between(1, 2))
        ]


def _sign(kind: str, fields: dict[str, Any], chain_id: int, dice: Dice) -> None:
    parity = dice.below(2)
    if kind == "frontier":
        fields["v"] = hex(27 + parity)
    elif kind == "legacy":
        fields["v"] = hex(chain_id * 2 + 35 + parity)
    else:
        fields["v"] = fields["yParity"] = hex(parity)
    fields["r"] = hex(dice.bits(256 - dice.below(16)))
    fields["s"] = hex(dice.bits(254))


def _created(fields: dict[str, Any]) -> str:
    """The address that a contract gets is the hash of its creator and the creator's nonce."""
    owner = rlp.encode([bytes.fromhex(fields["from"][2:]), int(fields["nonce"], 16)])
    return "0x" + keccak256(owner)[12:].hex()
