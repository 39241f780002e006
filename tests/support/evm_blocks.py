"""``made_block``: blocks that verify, made of random values, with every transaction type and ERC-20 and ERC-721
transfers.

Nothing was executed to get them, yet hashes, roots and filters are those of the contents, and senders have signed
their transactions. They come from ``tests.support.evm_encoding``, so that verification isn't checked with its own
encoders. ``seal`` makes them right again after a change.
"""

from __future__ import annotations

import random
from typing import Any

from coincurve import PrivateKey
from tiny_keccak import keccak256

from tests.support import evm_encoding
from tests.support.evm_encoding import logs_bloom, trie_root
from tracelake.evm.raw_block import RawBlock

Json = dict[str, Any]

CHAIN_ID = 31337
TRANSFER = "0x" + keccak256(b"Transfer(address,address,uint256)").hex()
EVERY_TYPE = ("0x0", "0x1", "0x2", "0x3", "0x4")
_BASE_FEE = 10**9
_KEYS = [PrivateKey(keccak256(bytes([number]))) for number in range(8)]
_SENDERS = {"0x" + keccak256(key.public_key.format(compressed=False)[1:])[12:].hex(): key for key in _KEYS}


def made_block(
    rng: random.Random,
    number: int,
    *,
    transactions: int = 20,
    logs: int = 1,
    kinds: tuple[str, ...] = EVERY_TYPE,
    withdrawals: int = 2,
) -> RawBlock:
    """A sealed block of the Prague fork."""
    block = _header(rng, number)
    block["withdrawals"] = [_withdrawal(rng, index) for index in range(withdrawals)]
    block["transactions"] = [_transaction(rng, rng.choice(kinds)) for _ in range(transactions)]
    receipts = [_receipt(rng, tx, logs) for tx in block["transactions"]]
    raw = RawBlock(number, block, receipts, None, "made")
    seal(raw)
    return raw


def seal(raw: RawBlock, *, more_gas: int = 0) -> None:
    """Set the fields that follow from the contents: signatures, places, gas, filters, roots, hashes. ``more_gas``
    is what the block has used beyond its transactions."""
    block, receipts = raw.block, raw.receipts or []
    gas = 0
    for receipt in receipts:
        gas += int(receipt["gasUsed"], 16)
        receipt["cumulativeGasUsed"] = hex(gas)
        receipt["logsBloom"] = _hex(logs_bloom(receipt["logs"]))
    block["gasUsed"] = hex(gas + more_gas)
    block["logsBloom"] = _hex(logs_bloom([log for receipt in receipts for log in receipt["logs"]]))
    for tx in block["transactions"]:
        _sign(tx)
    encoded = [evm_encoding.transaction(tx) for tx in block["transactions"]]
    block["transactionsRoot"] = _hex(trie_root(encoded))
    block["receiptsRoot"] = _hex(trie_root([evm_encoding.receipt(receipt) for receipt in receipts]))
    if block.get("withdrawals") is not None:
        withdrawals = [evm_encoding.withdrawal(one) for one in block["withdrawals"]]
        block["withdrawalsRoot"] = _hex(trie_root(withdrawals))
    block["number"] = hex(raw.number)
    block["hash"] = _hex(keccak256(evm_encoding.header(block)))
    _place(block, receipts, encoded)


def _place(block: Json, receipts: list[Json], encoded: list[bytes]) -> None:
    of_block = {"blockHash": block["hash"], "blockNumber": block["number"]}
    logs_before = 0
    for place, (tx, receipt, content) in enumerate(
        zip(block["transactions"], receipts, encoded, strict=True)
    ):
        tx |= of_block | {"transactionIndex": hex(place), "hash": _hex(keccak256(content))}
        of_transaction = of_block | {"transactionIndex": hex(place), "transactionHash": tx["hash"]}
        receipt |= of_transaction
        for log in receipt["logs"]:
            log |= of_transaction | {"logIndex": hex(logs_before), "removed": False}
            logs_before += 1


def _header(rng: random.Random, number: int) -> Json:
    return {
        "parentHash": _bytes(rng, 32),
        "sha3Uncles": _hex(keccak256(b"\xc0")),
        "miner": _bytes(rng, 20),
        "stateRoot": _bytes(rng, 32),
        "difficulty": "0x0",
        "totalDifficulty": hex(58750003716598352816469),
        "gasLimit": hex(1 << 40),
        "timestamp": hex(1_700_000_000 + number),
        "extraData": _bytes(rng, rng.randrange(33)),
        "mixHash": _bytes(rng, 32),
        "nonce": "0x0000000000000000",
        "baseFeePerGas": hex(_BASE_FEE),
        "blobGasUsed": "0x20000",
        "excessBlobGas": "0x0",
        "parentBeaconBlockRoot": _bytes(rng, 32),
        "requestsHash": _bytes(rng, 32),
        "size": hex(rng.randrange(500, 100_000)),
        "uncles": [],
    }


def _withdrawal(rng: random.Random, index: int) -> Json:
    validator, amount = hex(rng.randrange(10**6)), hex(rng.randrange(1, 64 * 10**9))
    return {"index": hex(index), "validatorIndex": validator, "address": _bytes(rng, 20), "amount": amount}


def _transaction(rng: random.Random, kind: str) -> Json:
    tx: Json = {
        "type": kind,
        "chainId": hex(CHAIN_ID),
        "nonce": hex(rng.randrange(1000)),
        "gas": hex(rng.randrange(21_000, 1 << 33)),
        "from": rng.choice(list(_SENDERS)),
        "to": None if kind in ("0x0", "0x2") and rng.random() < 0.05 else _bytes(rng, 20),
        "value": hex(rng.choice((0, rng.randrange(10**19), rng.randrange(1 << 256), (1 << 256) - 1))),
        "input": _bytes(rng, rng.choice((0, 1, 4, 68, 68, 68, 132, 228))),
    }
    if kind != "0x0":
        tx["accessList"] = _access_list(rng)
    if kind in ("0x0", "0x1"):
        tx["gasPrice"] = hex(rng.randrange(_BASE_FEE, 10**12))
        return tx
    priority, most = rng.randrange(10**9), rng.randrange(_BASE_FEE, 10**12)
    tx |= {"maxPriorityFeePerGas": hex(priority), "maxFeePerGas": hex(most)}
    tx["gasPrice"] = hex(min(most, _BASE_FEE + priority))
    if kind == "0x3":
        hashes = ["0x01" + rng.randbytes(31).hex() for _ in range(rng.randrange(1, 4))]
        tx |= {"maxFeePerBlobGas": hex(rng.randrange(1, 10**9)), "blobVersionedHashes": hashes}
    if kind == "0x4":
        tx["authorizationList"] = [_authorization(rng) for _ in range(rng.randrange(1, 3))]
    return tx


def _sign(tx: Json) -> None:
    """Sign a transaction as its sender."""
    digest = evm_encoding.signed_digest(tx, int(tx["chainId"], 16))
    signature = _SENDERS[tx["from"]].sign_recoverable(digest, hasher=None)
    r, s, parity = int.from_bytes(signature[:32]), int.from_bytes(signature[32:64]), signature[64]
    tx |= {"r": hex(r), "s": hex(s), "v": hex(parity)}
    if tx["type"] == "0x0":
        tx["v"] = hex(35 + 2 * int(tx["chainId"], 16) + parity)
    else:
        tx["yParity"] = hex(parity)


def _access_list(rng: random.Random) -> list[Json]:
    return [
        {"address": _bytes(rng, 20), "storageKeys": [_bytes(rng, 32) for _ in range(rng.randrange(3))]}
        for _ in range(rng.choice((0, 0, 0, 1, 2)))
    ]


def _authorization(rng: random.Random) -> Json:
    return {
        "chainId": hex(rng.choice((0, CHAIN_ID, (1 << 256) - 1))),
        "address": _bytes(rng, 20),
        "nonce": hex(rng.choice((0, 7, (1 << 64) - 1))),
        "yParity": hex(rng.randrange(2)),
        "r": hex(rng.randrange(1 << 256)),
        "s": hex(rng.randrange(1 << 256)),
    }


def _receipt(rng: random.Random, tx: Json, logs: int) -> Json:
    receipt: Json = {
        "type": tx["type"],
        "status": "0x0" if rng.random() < 0.1 else "0x1",
        "gasUsed": hex(rng.randrange(21_000, 500_000)),
        "effectiveGasPrice": tx["gasPrice"],
        "from": tx["from"],
        "to": tx["to"],
        "contractAddress": None if tx["to"] else evm_encoding.created_address(tx["from"], tx["nonce"]),
        "logs": [_transfer(rng) for _ in range(logs)],
    }
    if tx["type"] == "0x3":
        receipt |= {"blobGasUsed": hex(len(tx["blobVersionedHashes"]) << 17), "blobGasPrice": "0x1"}
    return receipt


def _transfer(rng: random.Random) -> Json:
    """A transfer: the amount of an ERC-20 is data, the token of an ERC-721 a fourth topic."""
    token = rng.randrange(50)
    parties = [
        "0x" + "00" * 12 + keccak256(rng.randrange(1000).to_bytes(2, "big"))[12:].hex() for _ in range(2)
    ]
    amount = "0x" + rng.choice((rng.randrange(10**19), (1 << 256) - 1)).to_bytes(32, "big").hex()
    topics = [TRANSFER, *parties] + ([amount] if token % 5 == 0 else [])
    data = "0x" if token % 5 == 0 else amount
    return {"address": _hex(keccak256(bytes([token]))[12:]), "topics": topics, "data": data}


def _bytes(rng: random.Random, count: int) -> str:
    return _hex(rng.randbytes(count))


def _hex(value: bytes) -> str:
    return "0x" + value.hex()
