"""Senders are those who signed: on real transactions of every type, and nobody for what can't be a signature."""

from __future__ import annotations

import random

import pytest
from coincurve import PrivateKey

from tests.support import evm_encoding
from tests.support.evm_blocks import made_block
from tests.support.recorded_blocks import RECORDED, KnownBlock
from tracelake.evm.consensus import signed_hash, transaction_parts
from tracelake.evm.hashing import keccak256
from tracelake.evm.raw_block import BlockMismatch, Senders, Verify
from tracelake.evm.senders import SignedHash, recover_senders
from tracelake.evm.verify import check_block

ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
DIGEST = keccak256(b"a message")
HIGH = ORDER.to_bytes(32)


@pytest.mark.parametrize("known", RECORDED, ids=str)
def test_recorded_transactions_are_from_who_signed_them(known: KnownBlock) -> None:
    transactions = known.raw.block["transactions"]
    signed = [signed_hash(tx, transaction_parts(tx)) for tx in transactions]
    assert recover_senders(signed) == [tx["from"] for tx in transactions]


def test_what_is_signed_is_what_an_independent_encoder_signs() -> None:
    for tx in made_block(random.Random(8), 1, transactions=30).block["transactions"]:
        expected = evm_encoding.signed_digest(tx, int(tx["chainId"], 16))
        assert signed_hash(tx, transaction_parts(tx)).digest == expected


@pytest.mark.parametrize(
    "wrong",
    [
        SignedHash(DIGEST, bytes(64), 0),
        SignedHash(DIGEST, HIGH + HIGH, 0),
        SignedHash(DIGEST, HIGH + bytes(31) + b"\x01", 1),
        SignedHash(DIGEST, bytes(31) + b"\x05" + bytes(31) + b"\x01", 0),
        SignedHash(DIGEST, b"\x01" * 64, -1),
        SignedHash(DIGEST, b"\x01" * 64, 4),
        SignedHash(DIGEST, b"\x01" * 63, 0),
        SignedHash(DIGEST, b"\x01" * 65, 0),
        SignedHash(b"short", b"\x01" * 64, 0),
    ],
)
def test_nobody_has_made_what_is_no_signature(wrong: SignedHash) -> None:
    key = PrivateKey(b"\x07" * 32)
    signature = key.sign_recoverable(DIGEST, hasher=None)
    right = SignedHash(DIGEST, signature[:64], signature[64])
    address = "0x" + keccak256(key.public_key.format(compressed=False)[1:])[12:].hex()
    # Those beside it aren't affected.
    assert recover_senders([right, wrong, right]) == [address, None, address]


def test_no_transactions_have_no_senders() -> None:
    assert recover_senders([]) == []


def test_the_nodes_senders_are_believed_where_that_was_asked_for() -> None:
    raw = made_block(random.Random(3), 9, transactions=4, kinds=("0x3",))
    for each in (raw.block["transactions"][2], (raw.receipts or [])[2]):
        each["from"] = "0x" + "cd" * 20
    check_block(raw, Verify.FULL, None, Senders.NODE)
    with pytest.raises(BlockMismatch, match=r"transaction 2 is from 0xcdcd.*, and 0x[0-9a-f]{40} signed it"):
        check_block(raw, Verify.FULL, None, Senders.DERIVE)


def test_capitals_of_a_checksum_are_no_other_sender() -> None:
    raw = made_block(random.Random(3), 9, transactions=4)
    for tx in raw.block["transactions"]:
        tx["from"] = "0x" + tx["from"][2:].upper()
    check_block(raw, Verify.FULL)
