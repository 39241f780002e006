"""Stored rows proven again from themselves: back to what the chain hashed, and hashed once more.

A row of a chain table has every field that its block's hash covers. So the header, the transactions, the receipts
and the withdrawals of a block can be rebuilt from the tables, and their hashes and roots computed, without any
endpoint. ``prove_rows`` does that for some blocks and returns what held and what didn't. The blocks' own hashes are
proven by the headers; the roots in the headers then prove the other tables. Afterwards the rebuilt blocks are
decoded as an ingest decodes them, which must give the same rows: that covers columns that follow from others.

Which proofs there are depends on the tables: without transactions there is no transactions' root. Blocks before
Byzantium have a state root in their receipts that only the table of receipts has. And it depends on the chain: the
tables have the columns of Ethereum, so blocks whose hashes cover more are counted, and not proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.evm.columns import UINT256_PARTS
from tracelake.evm.consensus import (
    header_hash,
    receipt_bytes,
    transaction_bytes,
    type_of,
    withdrawal_bytes,
)
from tracelake.evm.decode import decode
from tracelake.evm.forks import SCHEDULES, Fork, scheduled
from tracelake.evm.hashing import bloom_bits, keccak256, ordered_root
from tracelake.evm.profiles.profile import ChainProfile
from tracelake.evm.profiles.registry import profile_of
from tracelake.evm.raw_block import (
    BlockMalformed,
    BlockMismatch,
    ChainTable,
    RawBlock,
    Unprovable,
    Verify,
    need_receipts,
)
from tracelake.evm.schemas import TABLES
from tracelake.evm.verify import check_block
from tracelake.evm.wide_values import COLUMN as WIDE_VALUES

_JsonObject = dict[str, Any]
_Tables = Mapping[ChainTable, pa.Table]
_NO_LOGS = "0x" + "0" * 512
_STORED = "the stored rows"
# Columns may hold anything: nothing where a value is due, and values that no encoding has room for.
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)
_HEADER = {
    "parent_hash": "parentHash",
    "uncles_hash": "sha3Uncles",
    "author": "miner",
    "state_root": "stateRoot",
    "transactions_root": "transactionsRoot",
    "receipts_root": "receiptsRoot",
    "logs_bloom": "logsBloom",
    "gas_limit": "gasLimit",
    "gas_used": "gasUsed",
    "extra_data": "extraData",
    "mix_hash": "mixHash",
    "nonce": "nonce",
    "base_fee_per_gas": "baseFeePerGas",
    "withdrawals_root": "withdrawalsRoot",
    "blob_gas_used": "blobGasUsed",
    "excess_blob_gas": "excessBlobGas",
    "parent_beacon_block_root": "parentBeaconBlockRoot",
    "requests_hash": "requestsHash",
    "block_access_list_hash": "blockAccessListHash",
    "slot_number": "slotNumber",
    "size": "size",
    "uncles": "uncles",
}
_TRANSACTION = {
    "transaction_hash": "hash",
    "transaction_index": "transactionIndex",
    "transaction_type": "type",
    "nonce": "nonce",
    "from_address": "from",
    "to_address": "to",
    "input": "input",
    "gas_limit": "gas",
    "gas_price": "gasPrice",
    "max_priority_fee_per_gas": "maxPriorityFeePerGas",
    "max_fee_per_gas": "maxFeePerGas",
    "max_fee_per_blob_gas": "maxFeePerBlobGas",
    "blob_versioned_hashes": "blobVersionedHashes",
    "v": "v",
    "r": "r",
    "s": "s",
    "y_parity": "yParity",
    "chain_id": "chainId",
}
_RECEIPT = {
    "transaction_hash": "transactionHash",
    "transaction_index": "transactionIndex",
    "transaction_type": "type",
    "from_address": "from",
    "to_address": "to",
    "contract_address": "contractAddress",
    "gas_used": "gasUsed",
    "cumulative_gas_used": "cumulativeGasUsed",
    "effective_gas_price": "effectiveGasPrice",
    "blob_gas_used": "blobGasUsed",
    "blob_gas_price": "blobGasPrice",
    "root": "root",
}
_LOG = {
    "transaction_hash": "transactionHash",
    "transaction_index": "transactionIndex",
    "log_index": "logIndex",
    "address": "address",
    "data": "data",
}
_WITHDRAWAL = {
    "withdrawal_index": "index",
    "validator_index": "validatorIndex",
    "address": "address",
    "amount": "amount",
}
_TOPICS = ("topic0", "topic1", "topic2", "topic3")


class RowProof(StrEnum):
    """A way in which stored blocks were proven; the value says how."""

    HEADER = "block hash: keccak of the header that the columns of blocks give"
    TRANSACTIONS = "transactions root: every transaction encoded and hashed again"
    RECEIPTS = "receipts root: every receipt and its logs encoded and hashed again"
    BLOOM = "logs bloom: the logs' addresses and topics give the header's filter"
    WITHDRAWALS = "withdrawals root: every withdrawal encoded and hashed again"
    ROWS = "rows: the proven blocks decode to exactly these rows"


@dataclass(frozen=True, slots=True)
class RowMismatch:
    """A block whose rows don't hold, and why."""

    block: int
    what: str

    def __str__(self) -> str:
        return f"block {self.block}: {self.what}"


@dataclass(slots=True)
class RowsProven:
    """``blocks`` counts the blocks that each proof holds for, ``beyond_rows`` those whose hashes cover more than
    the tables have, as on chains with transaction types of their own."""

    blocks: dict[RowProof, int] = field(default_factory=dict)
    wrong: list[RowMismatch] = field(default_factory=list)
    beyond_rows: int = 0

    def held(self, proof: RowProof) -> None:
        self.blocks[proof] = self.blocks.get(proof, 0) + 1

    def add(self, other: RowsProven) -> None:
        for proof, count in other.blocks.items():
            self.blocks[proof] = self.blocks.get(proof, 0) + count
        self.wrong += other.wrong
        self.beyond_rows += other.beyond_rows


class _Differs(Exception):
    """A hash that the rows don't give. The text is a clause."""


def prove_rows(tables: _Tables, profile: ChainProfile | None = None) -> RowsProven:
    """``tables`` have all rows of the same blocks, ``blocks`` among them. Without ``profile`` the chain's id
    decides, which isn't right for a chain whose profile is known by its pool alone."""
    proven = RowsProven()
    rebuilt = _rebuild(tables, profile, proven)
    provable = [each for each in rebuilt if not each.beyond_rows]
    proven.beyond_rows = len(rebuilt) - len(provable)
    whole = [each for each in provable if _prove_block(each, tables, proven)]
    _decode_again(whole, tables, proven)
    return proven


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """A block from its rows; ``own_bits`` is the filter of its logs, if those are known. ``receipts`` is None where
    the tables don't have all that a receipt is made of, and ``lacks_outcomes`` if they should have."""

    number: int
    chain_id: int
    block: _JsonObject
    receipts: list[_JsonObject] | None
    own_bits: int | None
    lacks_outcomes: bool
    profile: ChainProfile

    @property
    def beyond_rows(self) -> bool:
        """Whether the hashes cover fields that no column has: on a chain with headers of another form, or with
        transactions of its own. A type that the chain doesn't have is no excuse."""
        profile, block = self.profile, self.block
        if profile.unprovable is not None:
            return True
        return (
            self._own_header
            or bool(profile.places_outside_roots(block))
            or any(type_of(tx) in profile.types or profile.is_system(tx) for tx in block["transactions"])
        )

    @property
    def _own_header(self) -> bool:
        """Such a chain may have Ethereum's headers as well, since a fork; those have a mixHash."""
        header = self.profile.header
        if header is None or "mixHash" not in self.block:
            return header is not None
        try:
            return header(self.block) is not None
        except KeyError:
            return True

    @property
    def raw(self) -> RawBlock:
        return RawBlock(self.number, self.block, self.receipts, None, _STORED, self.profile)


def _prove_block(each: _Rebuilt, tables: _Tables, proven: RowsProven) -> bool:
    try:
        for proof in list(_proofs(each, tables)):
            proven.held(proof)
    except (_Differs, Unprovable) as found:
        proven.wrong.append(RowMismatch(each.number, str(found)))
    except (BlockMismatch, BlockMalformed) as found:
        what = found.message.removeprefix(f"block {each.number} from {_STORED}: ")
        proven.wrong.append(RowMismatch(each.number, what))
    except _UNREADABLE as error:
        proven.wrong.append(RowMismatch(each.number, f"its rows can't be encoded: {error!r}"))
    else:
        return True
    return False


def _proofs(each: _Rebuilt, tables: _Tables) -> Iterator[RowProof]:
    block, has_transactions = each.block, ChainTable.TRANSACTIONS in tables
    if each.lacks_outcomes:
        raise _Differs("a receipt has neither a status nor a root")
    has_withdrawals = ChainTable.WITHDRAWALS in tables and block.get("withdrawalsRoot") is not None
    if has_transactions and each.receipts is not None and (has_withdrawals or "withdrawalsRoot" not in block):
        # The block is whole: it must pass the very proof that an ingest demands.
        check_block(each.raw, Verify.FULL, each.chain_id)
        yield from (RowProof.HEADER, RowProof.TRANSACTIONS, RowProof.BLOOM, RowProof.RECEIPTS)
        yield from [RowProof.WITHDRAWALS] if has_withdrawals else []
        return
    _must_be("the header's hash", header_hash(block), block["hash"])
    yield RowProof.HEADER
    if has_transactions:
        check_block(each.raw, Verify.BLOOM, each.chain_id)
        encoded = [transaction_bytes(tx) for tx in block["transactions"]]
        for place, (tx, content) in enumerate(zip(block["transactions"], encoded, strict=True)):
            _must_be(f"the hash of transaction {place}", keccak256(content), tx["hash"])
        _must_be("the transactions' root", ordered_root(encoded), block["transactionsRoot"])
        yield RowProof.TRANSACTIONS
    if each.own_bits is not None:
        _must_be("the filter of the logs", each.own_bits.to_bytes(256, "big"), block["logsBloom"])
        yield RowProof.BLOOM
    if each.receipts is not None:
        root = ordered_root([receipt_bytes(receipt) for receipt in each.receipts])
        _must_be("the receipts' root", root, block["receiptsRoot"])
        yield RowProof.RECEIPTS
    if has_withdrawals:
        root = ordered_root([withdrawal_bytes(one) for one in block["withdrawals"]])
        _must_be("the withdrawals' root", root, block["withdrawalsRoot"])
        yield RowProof.WITHDRAWALS


def _must_be(what: str, computed: bytes, stored: str) -> None:
    if "0x" + computed.hex() != stored:
        raise _Differs(f"{what} is 0x{computed.hex()}, and {stored} is stored")


def _decode_again(rebuilt: Sequence[_Rebuilt], tables: _Tables, proven: RowsProven) -> None:
    """Compare the decoded blocks with the rows, all at once where they are the same, as nearly always."""
    tables = {dataset: rows for dataset, rows in tables.items() if dataset is not ChainTable.TRACES}
    without = {dataset: rows for dataset, rows in tables.items() if not need_receipts([dataset])}
    for some, of in (
        ([each for each in rebuilt if each.receipts is not None], tables),
        ([each for each in rebuilt if each.receipts is None], without),
    ):
        if some and _differing(some, of, tables) is None:
            proven.blocks[RowProof.ROWS] = proven.blocks.get(RowProof.ROWS, 0) + len(some)
            continue
        for each in some:
            if (what := _differing([each], of, tables)) is None:
                proven.held(RowProof.ROWS)
            else:
                proven.wrong.append(RowMismatch(each.number, what))


def _differing(some: Sequence[_Rebuilt], compared: _Tables, known: _Tables) -> str | None:
    """The first column of ``compared`` that differs, or None."""
    raw = [each.raw for each in some]
    numbers = pa.array([each.number for each in some], pa.int64())
    for dataset, stored in compared.items():
        own = stored.filter(pc.is_in(stored.column("block_number"), numbers))
        try:
            again = pa.Table.from_batches([decode(raw, dataset, some[0].chain_id)])
        except BlockMalformed as malformed:
            return f"{dataset}: {malformed.field} {malformed.problem}"
        for name in TABLES[dataset].arrow.names:
            if _follows(dataset, name, known) and not own.column(name).equals(again.column(name)):
                return f"{dataset}.{name} isn't what the block decodes to"
    return None


def _follows(dataset: ChainTable, name: str, tables: _Tables) -> bool:
    """Whether a column can be compared: a count of rows needs the table that has them."""
    needs = {"transaction_count": ChainTable.TRANSACTIONS, "withdrawal_count": ChainTable.WITHDRAWALS}
    return dataset is not ChainTable.BLOCKS or name not in needs or needs[name] in tables


def _rebuild(tables: _Tables, profile: ChainProfile | None, proven: RowsProven) -> list[_Rebuilt]:
    lists: dict[ChainTable, dict[int, list[_JsonObject]]] = {
        dataset: _by_block(rows) for dataset, rows in tables.items() if dataset is not ChainTable.BLOCKS
    }
    found = []
    blocks = _rows(tables[ChainTable.BLOCKS])
    for row in blocks:
        number = row["block_number"]
        mine = {dataset: of_block.get(number, []) for dataset, of_block in lists.items()}
        try:
            # All are of one chain: a row that claims another must not be its own witness.
            chain_id = blocks[0]["chain_id"]
            found.append(_rebuild_block(row, mine, chain_id, profile or profile_of(None, chain_id)))
        except _UNREADABLE as error:
            proven.wrong.append(RowMismatch(number, f"its rows can't be read: {error!r}"))
    return found


def _rebuild_block(
    row: _JsonObject,
    rows: Mapping[ChainTable, list[_JsonObject]],
    chain_id: int,
    profile: ChainProfile,
) -> _Rebuilt:
    place = {"blockHash": _hex(row["block_hash"]), "blockNumber": hex(row["block_number"])}
    block = _named(row, _HEADER) | {
        "number": place["blockNumber"],
        "hash": place["blockHash"],
        "timestamp": hex(int(row["timestamp"].timestamp())),
        "difficulty": hex(int(row["difficulty_string"])),
        "transactions": [_transaction(tx) | place for tx in rows.get(ChainTable.TRANSACTIONS, ())],
    }
    if row["total_difficulty_string"] is not None:
        block["totalDifficulty"] = hex(int(row["total_difficulty_string"]))
    if block.get("withdrawalsRoot") is not None:
        block["withdrawals"] = [_named(one, _WITHDRAWAL) for one in rows.get(ChainTable.WITHDRAWALS, ())]
    logs = [_log(log) | place for log in rows.get(ChainTable.LOGS, ())]
    has_logs = ChainTable.LOGS in rows
    own_bits = bloom_bits(logs) if has_logs else None
    receipts = _receipts(rows, logs, place) if has_logs else None
    lacking = receipts is None and has_logs and _lacks_outcomes(rows, block, chain_id)
    return _Rebuilt(row["block_number"], chain_id, block, receipts, own_bits, lacking, profile)


def _transaction(row: _JsonObject) -> _JsonObject:
    tx = _named(row, _TRANSACTION)
    # Some chains have types without one value.
    if row["value_string"] is not None:
        tx["value"] = hex(int(row["value_string"]))
    if row["access_list"] is not None:
        tx["accessList"] = [
            {"address": _hex(one["address"]), "storageKeys": [_hex(key) for key in one["storage_keys"]]}
            for one in row["access_list"]
        ]
    if row["authorization_list"] is not None:
        tx["authorizationList"] = [
            {
                "chainId": hex(int(one["chain_id"])),
                "address": _hex(one["address"]),
                "nonce": hex(int(one["nonce"])),
                "yParity": hex(one["y_parity"]),
                "r": _hex(one["r"]),
                "s": _hex(one["s"]),
            }
            for one in row["authorization_list"]
        ]
    # Before EIP-155 a signature isn't for any chain.
    if row["transaction_type"] == 0 and (row["v"] is None or row["v"] < 35):
        del tx["chainId"]
    return tx


def _receipts(
    rows: Mapping[ChainTable, list[_JsonObject]], logs: Sequence[_JsonObject], place: _JsonObject
) -> list[_JsonObject] | None:
    """From the table of receipts, or from transactions, which have all of a receipt since Byzantium."""
    source = rows.get(ChainTable.RECEIPTS, rows.get(ChainTable.TRANSACTIONS))
    if source is None or any(map(_without_outcome, source)):
        return None
    by_transaction: dict[str, list[_JsonObject]] = {}
    for log in logs:
        by_transaction.setdefault(log["transactionIndex"], []).append(log)
    found = []
    for row in source:
        receipt = _named(row, _RECEIPT) | place
        own = by_transaction.get(receipt["transactionIndex"], [])
        receipt["logs"] = own
        receipt["logsBloom"] = f"0x{bloom_bits(own).to_bytes(256, 'big').hex()}" if own else _NO_LOGS
        if row["success"] is not None:
            receipt["status"] = "0x1" if row["success"] else "0x0"
        found.append(receipt)
    return found


def _without_outcome(row: _JsonObject) -> bool:
    return row["success"] is None and row.get("root") is None


def _lacks_outcomes(rows: Mapping[ChainTable, list[_JsonObject]], block: _JsonObject, chain_id: int) -> bool:
    """Whether an outcome was lost, rather than being a root, which only the table of receipts has: a block without
    outcomes would be proven without its receipts."""
    if ChainTable.RECEIPTS in rows:
        return True
    transactions = rows.get(ChainTable.TRANSACTIONS, [])
    if not all(map(_without_outcome, transactions)):
        return True
    number, time = int(block["number"], 16), int(block["timestamp"], 16)
    known = scheduled(SCHEDULES[chain_id], number, time) if chain_id in SCHEDULES else Fork.FRONTIER
    typed = any(row["transaction_type"] != 0 for row in transactions)
    with_status = typed or "baseFeePerGas" in block or known >= Fork.BYZANTIUM
    return bool(transactions) and with_status


def _log(row: _JsonObject) -> _JsonObject:
    return _named(row, _LOG) | {"topics": [_hex(row[name]) for name in _TOPICS if row[name] is not None]}


def _by_block(rows: pa.Table) -> dict[int, list[_JsonObject]]:
    """Rows are sorted by block. One without a number is of none, and missing from its own."""
    return {number: list(own) for number, own in groupby(_rows(rows), key=lambda row: row["block_number"])}


def _rows(rows: pa.Table) -> list[_JsonObject]:
    # Of a uint256 its text is enough.
    others = tuple(part for part in UINT256_PARTS if part != "_string")
    kept = [name for name in rows.column_names if not name.endswith(others)]
    found: list[_JsonObject] = rows.select(kept).to_pylist()
    return found


def _named(row: _JsonObject, names: Mapping[str, str]) -> _JsonObject:
    """Columns as JSON-RPC writes them; null is left out, as nodes leave it out."""
    wide = row.get(WIDE_VALUES)
    values = row if wide is None else row | {name: int(value) for name, value in orjson.loads(wide).items()}
    return {key: _json(value) for name, key in names.items() if (value := values.get(name)) is not None}


def _json(value: Any) -> Any:
    if isinstance(value, bytes):
        return _hex(value)
    return [_hex(one) for one in value] if isinstance(value, list) else hex(int(value))


def _hex(value: bytes) -> str:
    return "0x" + value.hex()
