"""A block with its hash: the header over a body, and the JSON that a node gives for it, encoded once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from tracelake.evm.consensus import header_bytes, withdrawal_bytes
from tracelake.evm.devchain.body import Body, body_at
from tracelake.evm.devchain.cast import cast_of
from tracelake.evm.devchain.dice import Dice
from tracelake.evm.devchain.profile import Profile
from tracelake.evm.devchain.traces import traces_of
from tracelake.evm.keccak import keccak256
from tracelake.evm.rlp import encode_list
from tracelake.evm.trie import ordered_root

GAS_LIMIT = 2**40
_NO_UNCLES = "0x1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"
_NO_REQUESTS = "0xe3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
_EXTRA = "0x" + b"tracelake devchain".hex()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One log for searching, with its JSON."""

    address: str
    topics: tuple[str, ...]
    encoded: bytes


@dataclass(frozen=True)
class SealedBlock:
    """``header`` is the block's JSON without its transactions; the others are JSON in the block's order."""

    number: int
    hash: str
    header: bytes
    hashes: tuple[str, ...]
    transactions: tuple[bytes, ...]
    receipts: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes of JSON, as a measure of the memory it takes."""
        return len(self.header) + sum(map(len, self.transactions)) + sum(map(len, self.receipts))

    @property
    def with_transactions(self) -> bytes:
        return self.header[:-1] + b',"transactions":[' + b",".join(self.transactions) + b"]}"

    @property
    def with_hashes(self) -> bytes:
        return self.header[:-1] + b',"transactions":' + orjson.dumps(self.hashes) + b"}"

    @property
    def all_receipts(self) -> bytes:
        return b"[" + b",".join(self.receipts) + b"]"

    @cached_property
    def logs(self) -> tuple[LogEntry, ...]:
        return tuple(
            LogEntry(log["address"], tuple(log["topics"]), orjson.dumps(log))
            for receipt in self.receipts
            for log in orjson.loads(receipt)["logs"]
        )

    @cached_property
    def traces(self) -> bytes:
        return orjson.dumps(traces_of(orjson.loads(self.with_transactions), orjson.loads(self.all_receipts)))


def seal(profile: Profile, fork: int, height: int, parent: str) -> SealedBlock:
    dice = Dice(profile.seed, "header", fork, height)
    frontier = height < profile.frontier
    base_fee = 0 if frontier else dice.between(7, 90_000_000_000)
    body = body_at(profile, fork, height, base_fee)
    header = _header(profile, height, parent, body, dice)
    header |= _difficulty(dice) if frontier else _modern(base_fee, body, dice)
    encoded = header_bytes(header)
    header["hash"] = "0x" + keccak256(encoded).hex()
    header["size"] = hex(_size(encoded, body))
    place = {"blockHash": header["hash"], "blockNumber": header["number"]}
    stamp = {**place, "blockTimestamp": header["timestamp"]}
    for position, (transaction, receipt) in enumerate(zip(body.transactions, body.receipts, strict=True)):
        index = {"transactionIndex": hex(position)}
        transaction |= place | index
        receipt |= place | index
        for log in receipt["logs"]:
            log |= stamp | index
    return SealedBlock(
        number=height,
        hash=header["hash"],
        header=orjson.dumps(header),
        hashes=tuple(each["hash"] for each in body.transactions),
        transactions=tuple(map(orjson.dumps, body.transactions)),
        receipts=tuple(map(orjson.dumps, body.receipts)),
    )


def _header(profile: Profile, height: int, parent: str, body: Body, dice: Dice) -> dict[str, Any]:
    return {
        "number": hex(height),
        "parentHash": parent,
        "sha3Uncles": _NO_UNCLES,
        "miner": cast_of(profile.seed).account(dice),
        "stateRoot": dice.hex(32),
        "transactionsRoot": "0x" + body.transactions_root.hex(),
        "receiptsRoot": "0x" + body.receipts_root.hex(),
        "logsBloom": "0x" + body.bloom.hex(),
        "gasLimit": hex(GAS_LIMIT),
        "gasUsed": hex(body.gas_used),
        "timestamp": hex(profile.genesis_time + height * profile.block_seconds),
        "extraData": _EXTRA,
        "mixHash": dice.hex(32),
        "uncles": [],
    }


def _size(header: bytes, body: Body) -> int:
    """The block as its peers would send it: header, transactions, no uncles, withdrawals."""
    transactions = encode_list(bytes(body.transactions_size))
    no_uncles = encode_list(b"")
    withdrawals = encode_list(b"".join(map(withdrawal_bytes, body.withdrawals)))
    return len(encode_list(header + transactions + no_uncles + withdrawals))


def _difficulty(dice: Dice) -> dict[str, Any]:
    """A header from before the merge."""
    return {"difficulty": hex(dice.bits(34)), "nonce": dice.hex(8)}


def _modern(base_fee: int, body: Body, dice: Dice) -> dict[str, Any]:
    """What the forks up to Prague have added."""
    return {
        "difficulty": "0x0",
        "nonce": "0x0000000000000000",
        "baseFeePerGas": hex(base_fee),
        "withdrawals": body.withdrawals,
        "withdrawalsRoot": "0x" + ordered_root([withdrawal_bytes(each) for each in body.withdrawals]).hex(),
        "blobGasUsed": hex(body.blob_gas_used),
        "excessBlobGas": "0x0",
        "parentBeaconBlockRoot": dice.hex(32),
        "requestsHash": _NO_REQUESTS,
    }
