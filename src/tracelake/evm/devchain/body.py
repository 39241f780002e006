"""What happens in a block: its transactions with their receipts, still without the hash of the block.

A pure function of the profile, the fork and the height, so any block can be made again without the ones before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracelake.evm.bloom import logs_bloom
from tracelake.evm.consensus import receipt_bytes
from tracelake.evm.devchain.cast import cast_of
from tracelake.evm.devchain.dice import Dice
from tracelake.evm.devchain.log_shapes import log_of
from tracelake.evm.devchain.profile import Profile
from tracelake.evm.devchain.transactions import BLOB_GAS, GIANT_GAS, Purpose, Signed, transaction_at
from tracelake.evm.rlp import encode_bytes
from tracelake.evm.trie import ordered_root

_EMPTY_EVERY = 9
_EMPTY_AT = 4
_WITHDRAWALS_EVERY = 5
_WITHDRAWALS_AT = 2
_BLOB_GAS_PRICE = 1
_SILENT = (Purpose.PAY, Purpose.FAIL)


@dataclass(frozen=True, slots=True)
class Body:
    """Transactions, receipts and logs as JSON-RPC shapes that lack the fields about their block."""

    transactions: list[dict[str, Any]]
    receipts: list[dict[str, Any]]
    withdrawals: list[dict[str, str]]
    transactions_root: bytes
    receipts_root: bytes
    bloom: bytes
    gas_used: int
    blob_gas_used: int
    transactions_size: int


def body_at(profile: Profile, fork: int, height: int, base_fee: int) -> Body:
    dice = Dice(profile.seed, "body", fork, height)
    signed = [
        transaction_at(profile, _origin(fork, dice), height, position)
        for position in range(_transactions(profile, height, dice))
    ]
    counts = _log_counts(profile, signed, dice)
    frontier = height < profile.frontier
    receipts: list[dict[str, Any]] = []
    spent = bloom = said = 0
    for transaction, logs in zip(signed, counts, strict=True):
        gas = _gas_used(transaction, dice)
        spent += gas
        receipt = _receipt(transaction, gas, spent, base_fee)
        receipt["logs"] = _logs(profile, height, said, logs, transaction.hash, dice)
        mask = logs_bloom(receipt["logs"])
        receipt["logsBloom"] = "0x" + mask.hex()
        if frontier:
            del receipt["status"]
            receipt["root"] = dice.hex(32)
        bloom |= int.from_bytes(mask)
        said += logs
        receipts.append(receipt)
    return Body(
        transactions=[_priced(each, base_fee) for each in signed],
        receipts=receipts,
        withdrawals=[] if frontier else _withdrawals(profile, height, dice),
        transactions_root=ordered_root([each.encoded for each in signed]),
        receipts_root=ordered_root([receipt_bytes(each) for each in receipts]),
        bloom=bloom.to_bytes(256),
        gas_used=spent,
        blob_gas_used=sum(int(each.get("blobGasUsed", "0x0"), 16) for each in receipts),
        transactions_size=sum(map(_size, signed)),
    )


def _size(transaction: Signed) -> int:
    """Bytes in the block, where a transaction with a type stands as a string and one without as a list."""
    typed = transaction.fields["type"] != "0x0"
    return len(encode_bytes(transaction.encoded)) if typed else len(transaction.encoded)


def _origin(fork: int, dice: Dice) -> int:
    """Half of a fork's transactions are those that the first fork has at the same place."""
    return fork if dice.below(2) else 0


def _transactions(profile: Profile, height: int, dice: Dice) -> int:
    if height == 0 or profile.transactions == 0:
        return 0
    if profile.steady:
        return profile.transactions
    if height % _EMPTY_EVERY == _EMPTY_AT:
        return 0
    return dice.between(1, 2 * profile.transactions - 1)


def _log_counts(profile: Profile, signed: list[Signed], dice: Dice) -> list[int]:
    """How many logs each has; on a steady chain those that have any share out an exact total."""
    speakers = [number for number, each in enumerate(signed) if each.purpose not in _SILENT]
    counts = [0] * len(signed)
    if not speakers:
        return counts
    for place, number in enumerate(speakers):
        if profile.steady:
            each, rest = divmod(profile.logs * len(signed), len(speakers))
            counts[number] = each + (place < rest)
        else:
            counts[number] = dice.below(2 * profile.logs + 1)
    return counts


def _gas_used(transaction: Signed, dice: Dice) -> int:
    match transaction.purpose:
        case Purpose.PAY:
            return 21_000
        case Purpose.GIANT:
            return GIANT_GAS + dice.below(1_000_000)
        case _:
            return dice.between(30_000, 90_000)


def _effective_price(transaction: Signed, base_fee: int) -> int:
    return min(transaction.fee_cap, base_fee + transaction.priority)


def _priced(transaction: Signed, base_fee: int) -> dict[str, Any]:
    return {**transaction.fields, "gasPrice": hex(_effective_price(transaction, base_fee))}


def _receipt(transaction: Signed, gas: int, cumulative: int, base_fee: int) -> dict[str, Any]:
    fields = transaction.fields
    receipt = {
        "type": fields["type"],
        "status": "0x0" if transaction.purpose is Purpose.FAIL else "0x1",
        "transactionHash": transaction.hash,
        "from": fields["from"],
        "to": fields["to"],
        "contractAddress": transaction.creates,
        "gasUsed": hex(gas),
        "cumulativeGasUsed": hex(cumulative),
        "effectiveGasPrice": hex(_effective_price(transaction, base_fee)),
    }
    if blobs := len(fields.get("blobVersionedHashes", ())):
        receipt["blobGasUsed"] = hex(blobs * BLOB_GAS)
        receipt["blobGasPrice"] = hex(_BLOB_GAS_PRICE)
    return receipt


def _logs(
    profile: Profile, height: int, first: int, count: int, transaction: str, dice: Dice
) -> list[dict[str, Any]]:
    cast = cast_of(profile.seed)
    logs = []
    for position in range(first, first + count):
        log = log_of(height, position, dice, cast)
        logs.append(
            {
                "address": log.address,
                "topics": log.topics,
                "data": log.data,
                "transactionHash": transaction,
                "logIndex": hex(position),
                "removed": False,
            }
        )
    return logs


def _withdrawals(profile: Profile, height: int, dice: Dice) -> list[dict[str, str]]:
    if height % _WITHDRAWALS_EVERY != _WITHDRAWALS_AT:
        return []
    cast = cast_of(profile.seed)
    return [
        {
            "index": hex(height * 16 + number),
            "validatorIndex": hex(dice.below(1_000_000)),
            "address": cast.account(dice),
            "amount": hex(dice.bits(dice.between(1, 35))),
        }
        for number in range(dice.between(1, 4))
    ]
