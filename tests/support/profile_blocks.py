"""Blocks of chains that differ from Ethereum, for tests of chain profiles.

``recorded`` are real: as nodes answered, one file each in ``recorded/profiles``. Only the receipt of Base's block
was written to match the recorded receiptsRoot. ``with_state_sync`` and ``sealed_with`` are synthetic: made blocks
with what no recording here has.
"""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import orjson
from tiny_keccak import keccak256

from tests.support import evm_encoding
from tests.support.evm_blocks import made_block, seal
from tests.support.evm_encoding import logs_bloom, trie_root
from tracelake.evm.profiles.profile import ChainProfile
from tracelake.evm.profiles.registry import PROFILES, profile_of
from tracelake.evm.raw_block import RawBlock

Json = dict[str, Any]
FOLDER = Path(__file__).parent / "recorded" / "profiles"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
ZERO = "0x" + "00" * 20


def recorded(name: str) -> tuple[RawBlock, int]:
    """A recorded block with the profile of its chain, and the chain's id."""
    given: Json = orjson.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    number, chain_id = int(given["block"]["number"], 16), given["chain_id"]
    raw = RawBlock(number, given["block"], given["receipts"], None, "recorded", profile_of(None, chain_id))
    return raw, chain_id


def under(raw: RawBlock, profile: str) -> RawBlock:
    return RawBlock(raw.number, raw.block, raw.receipts, raw.traces, raw.endpoint, PROFILES[profile])


def with_state_sync(number: int, *, receipt: bool = True) -> RawBlock:
    """A block of Polygon with two transactions and a state sync behind them, which its roots don't cover."""
    raw = made_block(
        random.Random(number), number, transactions=2, logs=2, kinds=("0x0", "0x2"), withdrawals=0
    )
    block, receipts = raw.block, raw.receipts
    assert receipts is not None
    for name in (
        *("withdrawals", "withdrawalsRoot", "blobGasUsed", "excessBlobGas"),
        *("parentBeaconBlockRoot", "requestsHash"),
    ):
        block.pop(name, None)
    seal(raw)
    key = b"matic-bor-receipt-" + number.to_bytes(8, "big") + bytes.fromhex(block["hash"][2:])
    place = {"blockHash": block["hash"], "blockNumber": block["number"], "transactionIndex": hex(2)}
    tx_hash = "0x" + keccak256(key).hex()
    numbers = dict.fromkeys(("gas", "gasPrice", "nonce", "value", "v", "r", "s", "type"), "0x0")
    block["transactions"].append(place | numbers | {"hash": tx_hash, "from": ZERO, "to": ZERO, "input": "0x"})
    if receipt:
        of_transaction = place | {"transactionHash": tx_hash}
        topics = ["0x" + keccak256(b"StateCommitted(uint256,bool)").hex()]
        log = {"address": ZERO[:-4] + "1001", "topics": topics, "data": "0x01", "logIndex": hex(4)}
        outcome = {"status": "0x1", "type": "0x0", "gasUsed": "0x0", "cumulativeGasUsed": "0x0"}
        receipts.append(
            of_transaction
            | outcome
            | {"from": ZERO, "to": ZERO, "contractAddress": None, "effectiveGasPrice": "0x0"}
            | {"logs": [of_transaction | log], "logsBloom": "0x" + logs_bloom([log]).hex()}
        )
    return under(raw, "polygon")


def sealed_with(profile: ChainProfile, tx: Json, encoded: bytes, tail: tuple[int, ...] = ()) -> RawBlock:
    """A block of one transaction of a type of its own, whose bytes were encoded by the caller. ``tail`` is what its
    receipt has behind the logs."""
    raw = made_block(random.Random(3), 77, transactions=1, logs=1, kinds=("0x0",), withdrawals=0)
    block = raw.block
    assert raw.receipts is not None
    [receipt] = raw.receipts
    receipt |= {"from": tx["from"], "to": tx.get("to"), "type": tx["type"], "contractAddress": None}
    receipt |= {"cumulativeGasUsed": receipt["gasUsed"]}
    of_transaction = {
        "transactionHash": "0x" + keccak256(encoded).hex(),
        "transactionIndex": "0x0",
        "blockNumber": block["number"],
    }
    fields = [1, int(receipt["gasUsed"], 16), bytes.fromhex(receipt["logsBloom"][2:])]
    logs = [
        [
            bytes.fromhex(log["address"][2:]),
            [bytes.fromhex(topic[2:]) for topic in log["topics"]],
            bytes.fromhex(log["data"][2:]),
        ]
        for log in receipt["logs"]
    ]
    receipt["status"] = "0x1"
    content = bytes([int(tx["type"], 16)]) + evm_encoding.encode([*fields, logs, *tail])
    block |= {
        "transactionsRoot": "0x" + trie_root([encoded]).hex(),
        "receiptsRoot": "0x" + trie_root([content]).hex(),
        "gasUsed": receipt["gasUsed"],
    }
    block["hash"] = "0x" + keccak256(evm_encoding.header(block)).hex()
    of_transaction["blockHash"] = block["hash"]
    receipt |= of_transaction
    for log in receipt["logs"]:
        log |= of_transaction
    tx |= of_transaction | {"hash": of_transaction["transactionHash"]}
    block["transactions"] = [tx]
    return RawBlock(raw.number, block, raw.receipts, None, "made", profile)
