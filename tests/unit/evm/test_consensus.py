"""Encodings are those of the chains: blocks and transactions of Ethereum's mainnet hash to their known hashes."""

import copy
import random
from typing import Any

import pytest

from tests.support import evm_encoding
from tests.support.evm_blocks import EVERY_TYPE, made_block
from tracelake.evm.consensus import (
    contract_address,
    header_bytes,
    header_hash,
    receipt_bytes,
    transaction_bytes,
    withdrawal_bytes,
)
from tracelake.evm.hashing import keccak256, ordered_root
from tracelake.evm.raw_block import RawBlock, UnknownTransactionType, Verify
from tracelake.evm.verify import check_block

EMPTY_ROOT = "0x56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421"
NO_UNCLES = "0x1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"
NO_BLOOM = "0x" + "00" * 256

GENESIS: dict[str, Any] = {
    "parentHash": "0x" + "00" * 32,
    "sha3Uncles": NO_UNCLES,
    "miner": "0x" + "00" * 20,
    "stateRoot": "0xd7f8974fb5ac78d9ac099b9ad5018bedc2ce0a72dad1827a1709da30580f0544",
    "transactionsRoot": EMPTY_ROOT,
    "receiptsRoot": EMPTY_ROOT,
    "logsBloom": NO_BLOOM,
    "difficulty": "0x400000000",
    "number": "0x0",
    "gasLimit": "0x1388",
    "gasUsed": "0x0",
    "timestamp": "0x0",
    "extraData": "0x11bbe8db4e347b4e8c937c1c8370e4b5ed33adb3db69cbdb7a38e1e50b1b82fa",
    "mixHash": "0x" + "00" * 32,
    "nonce": "0x0000000000000042",
    "hash": "0xd4e56740f876aef8c010b86a40d5f56745a118d0906a34e69aec8c0db1cb8fa3",
    "transactions": [],
    "uncles": [],
}

FIRST_TRANSACTION: dict[str, Any] = {
    "blockHash": "0x4e3a3754410177e6937ef1f84bba68ea139e8d1a2258c5f85db9f1cd715a1bdd",
    "blockNumber": "0xb443",
    "from": "0xa1e4380a3b1f749673e270229993ee55f35663b4",
    "gas": "0x5208",
    "gasPrice": "0x2d79883d2000",
    "hash": "0x5c504ed432cb51138bcf09aa5e8a410dd4a1e204ef84bfed1be16dfba1b22060",
    "input": "0x",
    "nonce": "0x0",
    "to": "0x5df9b87991262f6ba471f09758cde1c0fc1de734",
    "transactionIndex": "0x0",
    "value": "0x7a69",
    "v": "0x1c",
    "r": "0x88ff6cf0fefd94db46111149ae4bfc179e9b94721fffd821d38d16464b3f71d0",
    "s": "0x45e0aff800961cfce805daef7016b9b675c137a6a41a548f7b60a3484c06a33a",
}

BLOCK_46147: dict[str, Any] = {
    "difficulty": "0x153886c1bbd",
    "extraData": "0x657468706f6f6c2e6f7267",
    "gasLimit": "0x520b",
    "gasUsed": "0x5208",
    "hash": FIRST_TRANSACTION["blockHash"],
    "logsBloom": NO_BLOOM,
    "miner": "0xe6a7a1d47ff21b6321162aea7c6cb457d5476bca",
    "mixHash": "0xb48c515a9dde8d346c3337ea520aa995a4738bb595495506125449c1149d6cf4",
    "nonce": "0xba4f8ecd18aab215",
    "number": "0xb443",
    "parentHash": "0x5a41d0e66b4120775176c09fcf39e7c0520517a13d2b57b18d33d342df038bfc",
    "receiptsRoot": "0xfe2bf2a941abf41d72637e5b91750332a30283efd40c424dc522b77e6f0ed8c4",
    "sha3Uncles": NO_UNCLES,
    "stateRoot": "0x0e0df2706b0a4fb8bd08c9246d472abbe850af446405d9eba1db41db18b4a169",
    "timestamp": "0x55c42659",
    "transactionsRoot": "0x4513310fcb9f6f616972a3b948dc5d547f280849a87ebb5af0191f98b87be598",
    "transactions": [FIRST_TRANSACTION],
    "uncles": [],
}

RECEIPTS_46147: list[dict[str, Any]] = [
    {
        "blockHash": FIRST_TRANSACTION["blockHash"],
        "blockNumber": "0xb443",
        "contractAddress": None,
        "cumulativeGasUsed": "0x5208",
        "from": FIRST_TRANSACTION["from"],
        "gasUsed": "0x5208",
        "logs": [],
        "logsBloom": NO_BLOOM,
        "root": "0x96a8e009d2b88b1483e6941e6812e32263b05683fac202abc622a3e31aed1957",
        "to": FIRST_TRANSACTION["to"],
        "transactionHash": FIRST_TRANSACTION["hash"],
        "transactionIndex": "0x0",
    }
]

WITH_FEES: dict[str, Any] = {
    "type": "0x2",
    "chainId": "0x1",
    "nonce": "0x7a7ad",
    "gas": "0x3a9ee",
    "maxFeePerGas": "0x27adb5c12",
    "maxPriorityFeePerGas": "0x150f3e53b",
    "hash": "0x2bddf9d792fbf4c8931b26914c577fc42ccd1cf4dab5db72c97eaeb871248a9a",
    "input": "0xa0000000"
    "00000000000000000000000088e6a0c2ddd26feeb64f039a2c41296fcb3f5640"
    "0000000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000ac5e2e6cdbdeb40f"
    "00000000000000000000000000000000000000000000000000000009dab0e9dd"
    "000000000000000000000000c02aaa39b223fe8d0a0e5c4f27ead9083c756cc2",
    "to": "0x68d3a973e7272eb388022a5c6518d9b2a2e66fbf",
    "value": "0x1479d86",
    "accessList": [],
    "r": "0x3e9008fe764b2b88eb1ce0bd6542d0c8f7bba6e52b5e28017b353e7b8083e894",
    "s": "0x20c904b64c96590835dc986249fe4425a2f1500d6959852dea6bc3629fcc66ad",
    "yParity": "0x0",
}

WITHDRAWN = [  # of block 21470578, all to one address
    *("0x128328a", "0x1262d41", "0x127ef72", "0x12727aa", "0x127e627", "0x1279144", "0x128bf38", "0x12908fc"),
    *("0x1286675", "0x1291120", "0x128a65f", "0x128d180", "0x128a7a6", "0x127eaf3", "0x128f716", "0x128b81c"),
]


def test_mainnets_genesis_hashes_to_its_hash() -> None:
    assert "0x" + header_hash(GENESIS).hex() == GENESIS["hash"]
    check_block(RawBlock(0, GENESIS, [], None, "mainnet"), Verify.FULL, 1)


def test_mainnets_first_block_with_a_transaction_verifies_with_its_receipt_of_before_byzantium() -> None:
    check_block(RawBlock(46147, BLOCK_46147, RECEIPTS_46147, None, "mainnet"), Verify.FULL, 1)


def test_the_root_of_a_receipt_of_before_byzantium_is_part_of_the_receipts_root() -> None:
    receipts = copy.deepcopy(RECEIPTS_46147)
    receipts[0]["root"] = "0x97" + receipts[0]["root"][4:]
    assert ordered_root([receipt_bytes(receipts[0])]).hex() != BLOCK_46147["receiptsRoot"][2:]


def test_the_example_of_eip_155_is_encoded_as_given_there() -> None:
    tx = {
        "nonce": "0x9",
        "gasPrice": "0x4a817c800",
        "gas": "0x5208",
        "to": "0x" + "35" * 20,
        "value": "0xde0b6b3a7640000",
        "input": "0x",
        "v": "0x25",
        "r": "0x28ef61340bd939bc2195fe537567866003e1a15d3c71ff63e1590620aa636276",
        "s": "0x67cbe9d8997f761aecb703304b3800ccf555c9f3dc64214b297fb1966a3b6d83",
    }
    assert transaction_bytes(tx).hex() == (
        "f86c098504a817c800825208943535353535353535353535353535353535353535880de0b6b3a76400008025a0"
        "28ef61340bd939bc2195fe537567866003e1a15d3c71ff63e1590620aa636276a0"
        "67cbe9d8997f761aecb703304b3800ccf555c9f3dc64214b297fb1966a3b6d83"
    )


def test_a_transaction_with_fees_hashes_to_its_hash() -> None:
    assert "0x" + keccak256(transaction_bytes(WITH_FEES)).hex() == WITH_FEES["hash"]


def test_numbers_padded_with_zeros_are_the_same_numbers() -> None:
    padded = WITH_FEES | {"nonce": "0x00007a7ad", "value": "0x" + "00" * 20 + "01479d86"}
    assert transaction_bytes(padded) == transaction_bytes(WITH_FEES)


def test_mainnets_withdrawals_give_their_root() -> None:
    withdrawals = [
        {
            "index": hex(0x43AEA0B + place),
            "validatorIndex": hex(0xC1C6A + place),
            "address": "0xb9d7934878b5fb9610b3fe8a5e441e8fad7e293f",
            "amount": amount,
        }
        for place, amount in enumerate(WITHDRAWN)
    ]
    root = ordered_root([withdrawal_bytes(one) for one in withdrawals])
    assert root.hex() == "549d97d094b3215b7d7cdf2ed672cbb35dc2bc4c43ea8ffa572412cbc57a3203"


@pytest.mark.parametrize(
    ("nonce", "address"),
    [
        ("0x0", "0xcd234a471b72ba2f1ccf0a70fcaba648a5eecd8d"),
        ("0x1", "0x343c43a37d37dff08ae8c4a11544c718abb4fcf8"),
        ("0x2", "0xf778b86fa74e846c4f0a1fbd1335fe81c00a0c91"),
    ],
)
def test_contracts_are_made_where_they_are_known_to_be(nonce: str, address: str) -> None:
    assert contract_address("0x6ac7ea33f8831ea9dcc53393aaa88b25a785dbf0", nonce) == address


@pytest.mark.parametrize("encode", [transaction_bytes, receipt_bytes])
def test_an_unknown_type_is_named(encode: Any) -> None:
    with pytest.raises(UnknownTransactionType, match="type 0x7e isn't known"):
        encode(FIRST_TRANSACTION | {"type": "0x7e"})


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_random_blocks_of_each_type_are_encoded_as_by_the_rlp_library(kind: str) -> None:
    for seed in range(20):
        raw = made_block(random.Random(f"{kind} {seed}"), 5 + seed, transactions=6, kinds=(kind,))
        assert header_bytes(raw.block) == evm_encoding.header(raw.block)
        for tx, receipt in zip(raw.block["transactions"], raw.receipts or [], strict=True):
            assert transaction_bytes(tx) == evm_encoding.transaction(tx)
            assert receipt_bytes(receipt) == evm_encoding.receipt(receipt)
            created = evm_encoding.created_address(tx["from"], tx["nonce"])
            assert contract_address(tx["from"], tx["nonce"]) == created
        for one in raw.block["withdrawals"]:
            assert withdrawal_bytes(one) == evm_encoding.withdrawal(one)


def test_blocks_of_before_byzantium_and_without_later_fields_are_encoded_as_by_the_rlp_library() -> None:
    for block in (GENESIS, BLOCK_46147):
        assert header_bytes(block) == evm_encoding.header(block)
    assert receipt_bytes(RECEIPTS_46147[0]) == evm_encoding.receipt(RECEIPTS_46147[0])
    assert transaction_bytes(FIRST_TRANSACTION) == evm_encoding.transaction(FIRST_TRANSACTION)
