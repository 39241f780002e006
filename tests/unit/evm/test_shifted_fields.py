"""Encodings of a block's fields can't be cut in other places: a field that is too long would take over the
beginning of the next, and all of it together would hash to the right value.

``check_block`` itself refuses such a block. A job that stores only some tables decodes only their columns, so the
widths of all others are nobody's business but the proof's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.support.block_lies import receipts, transactions
from tests.support.recorded_blocks import RECORDED, SYNTHETIC
from tracelake.evm.raw_block import BlockMalformed, RawBlock, Verify
from tracelake.evm.verify import check_block

KNOWN = {known.name: known for known in (*RECORDED, *SYNTHETIC)}


def shifted(fixed: str, number: str) -> tuple[str, str]:
    """The same bytes when both are encoded, with another number: all but its last byte goes to the field before."""
    digits = number[2:] if len(number) % 2 == 0 else "0" + number[2:]
    assert len(digits) > 2
    assert digits[-2] < "8", "the last byte must be its own encoding"
    return f"{fixed}{128 + len(digits) // 2:x}{digits[:-2]}", hex(int(digits[-2:], 16))


def shift_base_fee(raw: RawBlock) -> None:
    raw.block["nonce"], fee = shifted(raw.block["nonce"], raw.block["baseFeePerGas"])
    raw.block["baseFeePerGas"] = fee
    for tx, receipt in zip(raw.block["transactions"], receipts(raw), strict=True):
        if "maxFeePerGas" in tx:
            most, tip = int(tx["maxFeePerGas"], 16), int(tx["maxPriorityFeePerGas"], 16)
            tx["gasPrice"] = receipt["effectiveGasPrice"] = hex(min(most, int(fee, 16) + tip))


def shift_gas(raw: RawBlock) -> None:
    """Of any receipt but the last, whose gas is the block's."""
    before = 0
    for place, receipt in enumerate(receipts(raw)[:-1]):
        gas = receipt["cumulativeGasUsed"]
        if int(gas, 16) & 0x80 == 0:
            receipt["root"], receipt["cumulativeGasUsed"] = shifted(receipt["root"], gas)
            receipt["gasUsed"] = hex(max(0, int(receipt["cumulativeGasUsed"], 16) - before))
            following = receipts(raw)[place + 1]
            rest = int(following["cumulativeGasUsed"], 16) - int(receipt["cumulativeGasUsed"], 16)
            following["gasUsed"] = hex(rest)
            return
        before = int(gas, 16)
    raise AssertionError("no receipt's gas can be shifted")


def shift_value(raw: RawBlock) -> None:
    """A transaction's value, into its recipient."""
    for tx in raw.block["transactions"]:
        if tx["to"] is not None and len(tx["value"]) > 4 and int(tx["value"], 16) & 0x80 == 0:
            tx["to"], tx["value"] = shifted(tx["to"], tx["value"])
            return
    raise AssertionError("no value can be shifted")


def shift_withdrawal(raw: RawBlock) -> None:
    for entry in raw.block["withdrawals"]:
        if len(entry["amount"]) > 4 and int(entry["amount"], 16) & 0x80 == 0:
            entry["address"], entry["amount"] = shifted(entry["address"], entry["amount"])
            return
    raise AssertionError("no amount can be shifted")


def join_blob_hashes(raw: RawBlock) -> None:
    """Two hashes in one text would be one blob, and half of the gas."""
    [tx] = transactions(raw, "0x3")
    joined = "".join(tx["blobVersionedHashes"])
    tx["blobVersionedHashes"] = [joined[:33], joined[33:]]


@pytest.mark.parametrize(
    ("name", "lie", "problem"),
    [
        ("synthetic London", shift_base_fee, "nonce has 28 characters instead of 18"),
        ("synthetic Frontier", shift_gas, "isn't 32 bytes"),
        ("Ethereum 20066032", shift_value, "isn't an address"),
        ("synthetic Osaka", shift_withdrawal, "isn't an address"),
        ("synthetic Osaka", join_blob_hashes, "isn't a list of values of 32 bytes"),
    ],
)
def test_what_is_cut_in_another_place_is_refused(
    name: str, lie: Callable[[RawBlock], None], problem: str
) -> None:
    known = KNOWN[name]
    raw = copy.deepcopy(known.raw)
    lie(raw)
    with pytest.raises(BlockMalformed, match=problem):
        check_block(raw, Verify.FULL, known.chain_id)
