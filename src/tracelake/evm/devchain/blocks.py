"""Blocks of a dev chain: transactions, receipts, logs and traces under a header with the right hash, as a
node's JSON.

A block is a pure function of the profile, the branch, the height and the parent's hash, so any block can be made
again without the ones before it. Its JSON is encoded once. Header, transactions and receipts have the form of the
profile's fork at that height.

Traces have the shape of ``trace_block``. No EVM executes anything: every transaction has its outer call or
creation, a call that made logs has a delegate call inside, and a failed one was reverted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from tracelake.evm.consensus import BLOB_GAS, header_bytes, receipt_bytes, withdrawal_bytes
from tracelake.evm.devchain.accounts import SeededRandom, accounts_of
from tracelake.evm.devchain.profile import DevChainProfile
from tracelake.evm.devchain.transactions import (
    GIANT_GAS,
    SYSTEM_ADDRESS,
    Log,
    SignedTransaction,
    TransactionPurpose,
    log_of,
    payment,
    transaction_at,
)
from tracelake.evm.forks import FORKS, Fork
from tracelake.evm.hashing import NO_UNCLES, encode_bytes, encode_list, keccak256, logs_bloom, ordered_root

# Giant transactions use billions each, and a block may have many of them.
GAS_LIMIT = 2**40
_NO_REQUESTS = "0xe3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
_EXTRA = "0x" + b"tracelake devchain".hex()
_EMPTY_EVERY = 9
_EMPTY_AT = 4
_WITHDRAWALS_EVERY = 5
_WITHDRAWALS_AT = 2
_BLOB_GAS_PRICE = 1
_SILENT = (TransactionPurpose.PAY, TransactionPurpose.FAIL)
_STIPEND = 21_000


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A log's address and topics for filters, and its JSON."""

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
        """Bytes of JSON, as an estimate of memory."""
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


def seal(profile: DevChainProfile, branch: int, height: int, parent: str) -> SealedBlock:
    rng = SeededRandom(profile.seed, "header", branch, height)
    fork = profile.fork_at(height)
    base_fee = rng.between(7, 90_000_000_000) if fork >= Fork.LONDON else 0
    body = body_at(profile, branch, height, base_fee)
    header = _header(profile, height, parent, body, rng)
    header |= _proof(fork, rng) | _later_fields(fork, height, base_fee, body, rng)
    # The hash covers the header alone, so it comes before the fields that contain it.
    encoded = header_bytes(header)
    header["hash"] = "0x" + keccak256(encoded).hex()
    header["size"] = hex(_block_size(encoded, body))
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


def _header(
    profile: DevChainProfile, height: int, parent: str, body: BlockBody, rng: SeededRandom
) -> dict[str, Any]:
    return {
        "number": hex(height),
        "parentHash": parent,
        "sha3Uncles": NO_UNCLES,
        "miner": accounts_of(profile.seed).account(rng),
        "stateRoot": rng.hex(32),
        "transactionsRoot": "0x" + body.transactions_root.hex(),
        "receiptsRoot": "0x" + body.receipts_root.hex(),
        "logsBloom": "0x" + body.bloom.hex(),
        "gasLimit": hex(GAS_LIMIT),
        "gasUsed": hex(body.gas_used),
        "timestamp": hex(profile.genesis_time + height * profile.block_seconds),
        "extraData": _EXTRA,
        "mixHash": rng.hex(32),
        "uncles": [],
    }


def _block_size(header: bytes, body: BlockBody) -> int:
    """The size of the block on the wire: header, transactions, no uncles, withdrawals."""
    # Only the length counts, so zeros stand in for the transactions.
    transactions = encode_list(bytes(body.transactions_size))
    no_uncles = encode_list(b"")
    withdrawals = encode_list(b"".join(map(withdrawal_bytes, body.withdrawals)))
    return len(encode_list(header + transactions + no_uncles + withdrawals))


def _proof(fork: Fork, rng: SeededRandom) -> dict[str, Any]:
    """Header fields of proof of work, which have been constant since the Merge."""
    if fork < Fork.PARIS:
        return {"difficulty": hex(rng.bits(34)), "nonce": rng.hex(8)}
    return {"difficulty": "0x0", "nonce": "0x0000000000000000"}


def _later_fields(
    fork: Fork, height: int, base_fee: int, body: BlockBody, rng: SeededRandom
) -> dict[str, Any]:
    """Header fields that forks have appended, up to this one."""
    fields = {
        "baseFeePerGas": hex(base_fee),
        "withdrawalsRoot": "0x" + ordered_root([withdrawal_bytes(each) for each in body.withdrawals]).hex(),
        "blobGasUsed": hex(body.blob_gas_used),
        "excessBlobGas": "0x0",
        "parentBeaconBlockRoot": rng.hex(32),
        "requestsHash": _NO_REQUESTS,
        "blockAccessListHash": rng.hex(32),
        "slotNumber": hex(height),
    }
    has = {name: fields[name] for rules in FORKS[: fork + 1] for name, _ in rules.header}
    return has | ({"withdrawals": body.withdrawals} if "withdrawalsRoot" in has else {})


@dataclass(frozen=True, slots=True)
class BlockBody:
    """Transactions, receipts and logs in JSON-RPC's shape, without the fields about their block."""

    transactions: list[dict[str, Any]]
    receipts: list[dict[str, Any]]
    withdrawals: list[dict[str, str]]
    transactions_root: bytes
    receipts_root: bytes
    bloom: bytes
    gas_used: int
    """The gas of the block, which isn't the sum of its transactions' since Amsterdam."""
    blob_gas_used: int
    transactions_size: int


def body_at(profile: DevChainProfile, branch: int, height: int, base_fee: int) -> BlockBody:
    rng = SeededRandom(profile.seed, "body", branch, height)
    signed = [
        transaction_at(profile, _origin(branch, rng), height, position)
        for position in range(_transactions(profile, height, rng))
    ]
    counts = _log_counts(profile, signed, rng)
    accounts = accounts_of(profile.seed)
    fork = profile.fork_at(height)
    receipts: list[dict[str, Any]] = []
    spent = bloom = log_count = 0
    for transaction, logs in zip(signed, counts, strict=True):
        gas = _gas_used(transaction, rng)
        spent += gas
        receipt = _receipt(transaction, gas, spent, base_fee)
        made = [payment(transaction.fields)] if _pays(transaction, fork) else []
        made += [log_of(height, log_count + number, rng, accounts) for number in range(logs)]
        receipt["logs"] = _logs(made, log_count, transaction.hash)
        mask = logs_bloom(receipt["logs"])
        receipt["logsBloom"] = "0x" + mask.hex()
        if fork < Fork.BYZANTIUM:
            del receipt["status"]
            receipt["root"] = rng.hex(32)
        bloom |= int.from_bytes(mask)
        log_count += len(made)
        receipts.append(receipt)
    return BlockBody(
        transactions=[_priced(each, base_fee) for each in signed],
        receipts=receipts,
        withdrawals=_withdrawals(profile, height, rng) if fork >= Fork.SHANGHAI else [],
        transactions_root=ordered_root([each.encoded for each in signed]),
        receipts_root=ordered_root([receipt_bytes(each) for each in receipts]),
        bloom=bloom.to_bytes(256),
        gas_used=spent + rng.below(spent // 5 + 1) if fork >= Fork.AMSTERDAM else spent,
        blob_gas_used=sum(int(each.get("blobGasUsed", "0x0"), 16) for each in receipts),
        transactions_size=sum(map(_transaction_size, signed)),
    )


def _transaction_size(transaction: SignedTransaction) -> int:
    """Bytes in the block, where a typed transaction is a string and a legacy one a list."""
    typed = transaction.fields["type"] != "0x0"
    return len(encode_bytes(transaction.encoded)) if typed else len(transaction.encoded)


def _origin(branch: int, rng: SeededRandom) -> int:
    """Half of a branch's transactions are those that the first branch has at the same place."""
    return branch if rng.below(2) else 0


def _transactions(profile: DevChainProfile, height: int, rng: SeededRandom) -> int:
    if height == 0 or profile.transactions == 0:
        return 0
    if profile.steady:
        return profile.transactions
    if height % _EMPTY_EVERY == _EMPTY_AT:
        return 0
    return rng.between(1, 2 * profile.transactions - 1)


def _log_counts(profile: DevChainProfile, signed: list[SignedTransaction], rng: SeededRandom) -> list[int]:
    """The number of logs of each transaction. On a steady chain the total of a block is exact."""
    speakers = [number for number, each in enumerate(signed) if each.purpose not in _SILENT]
    counts = [0] * len(signed)
    if not speakers:
        return counts
    for place, number in enumerate(speakers):
        if profile.steady:
            each, rest = divmod(profile.logs * len(signed), len(speakers))
            counts[number] = each + (place < rest)
        else:
            counts[number] = rng.below(2 * profile.logs + 1)
    return counts


def _gas_used(transaction: SignedTransaction, rng: SeededRandom) -> int:
    match transaction.purpose:
        case TransactionPurpose.PAY:
            return 21_000
        case TransactionPurpose.GIANT:
            return GIANT_GAS + rng.below(1_000_000)
        case _:
            return rng.between(30_000, 90_000)


def _effective_price(transaction: SignedTransaction, base_fee: int) -> int:
    return min(transaction.fee_cap, base_fee + transaction.priority)


def _priced(transaction: SignedTransaction, base_fee: int) -> dict[str, Any]:
    return {**transaction.fields, "gasPrice": hex(_effective_price(transaction, base_fee))}


def _receipt(transaction: SignedTransaction, gas: int, cumulative: int, base_fee: int) -> dict[str, Any]:
    fields = transaction.fields
    receipt = {
        "type": fields["type"],
        "status": "0x0" if transaction.purpose is TransactionPurpose.FAIL else "0x1",
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


def _pays(transaction: SignedTransaction, fork: Fork) -> bool:
    """Whether it moves ether to another account, of which there is a log since Amsterdam (EIP-7708)."""
    fields = transaction.fields
    if fork < Fork.AMSTERDAM or transaction.purpose is not TransactionPurpose.PAY:
        return False
    return bool(int(fields["value"], 16)) and fields["from"] != fields["to"]


def _logs(made: list[Log], first: int, transaction: str) -> list[dict[str, Any]]:
    return [
        {
            "address": log.address,
            "topics": log.topics,
            "data": log.data,
            "transactionHash": transaction,
            "logIndex": hex(position),
            "removed": False,
        }
        for position, log in enumerate(made, first)
    ]


def _withdrawals(profile: DevChainProfile, height: int, rng: SeededRandom) -> list[dict[str, str]]:
    if height % _WITHDRAWALS_EVERY != _WITHDRAWALS_AT:
        return []
    accounts = accounts_of(profile.seed)
    return [
        {
            "index": hex(height * 16 + number),
            "validatorIndex": hex(rng.below(1_000_000)),
            "address": accounts.account(rng),
            "amount": hex(rng.bits(rng.between(1, 35))),
        }
        for number in range(rng.between(1, 4))
    ]


def traces_of(block: dict[str, Any], receipts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for transaction, receipt in zip(block["transactions"], receipts, strict=True):
        place = {
            "blockHash": block["hash"],
            "blockNumber": int(block["number"], 16),
            "transactionHash": transaction["hash"],
            "transactionPosition": int(transaction["transactionIndex"], 16),
        }
        # No contract makes the log of a payment.
        by_contract = [log for log in receipt["logs"] if log["address"] != SYSTEM_ADDRESS]
        inner = [_inner(transaction, receipt)] if by_contract and transaction["to"] is not None else []
        outer = _outer(transaction, receipt, len(inner))
        traces += [each | place for each in (outer, *inner)]
    if int(block["difficulty"], 16):
        traces.append(_reward(block))
    return traces


def _outer(transaction: dict[str, Any], receipt: dict[str, Any], subtraces: int) -> dict[str, Any]:
    trace: dict[str, Any] = {"subtraces": subtraces, "traceAddress": []}
    shared = {
        "from": transaction["from"],
        "gas": hex(int(transaction["gas"], 16) - _STIPEND),
        "value": transaction["value"],
    }
    used = hex(int(receipt["gasUsed"], 16) - _STIPEND)
    if transaction["to"] is None:
        trace |= {
            "type": "create",
            "action": shared | {"init": transaction["input"], "creationMethod": "create"},
        }
        result = {"address": receipt["contractAddress"], "code": "0x", "gasUsed": used}
    else:
        action = shared | {"to": transaction["to"], "input": transaction["input"], "callType": "call"}
        trace |= {"type": "call", "action": action}
        result = {"gasUsed": used, "output": "0x"}
    if receipt.get("status") == "0x0":
        return trace | {"error": "Reverted", "result": None}
    return trace | {"result": result}


def _inner(transaction: dict[str, Any], receipt: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "call",
        "action": {
            "from": transaction["to"],
            "to": receipt["logs"][0]["address"],
            "gas": hex(int(receipt["gasUsed"], 16) // 2),
            "value": "0x0",
            "input": transaction["input"],
            "callType": "delegatecall",
        },
        "result": {"gasUsed": hex(int(receipt["gasUsed"], 16) // 4), "output": "0x"},
        "subtraces": 0,
        "traceAddress": [0],
    }


def _reward(block: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "reward",
        "action": {"author": block["miner"], "rewardType": "block", "value": hex(5 * 10**18)},
        "result": None,
        "subtraces": 0,
        "traceAddress": [],
        "blockHash": block["hash"],
        "blockNumber": int(block["number"], 16),
        "transactionHash": None,
        "transactionPosition": None,
    }
