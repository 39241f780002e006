"""What a block says is what its tables say, value for value; what it can't say is refused with its place."""

import copy
import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.evm_blocks import CHAIN_ID, EVERY_TYPE, TRANSFER, made_block
from tests.support.wide_integers import stored_integer
from tracelake.domain.errors import Invalid
from tracelake.evm.decode import decode
from tracelake.evm.raw_block import BlockMalformed, ChainTable, RawBlock
from tracelake.evm.schemas import TABLES

Json = dict[str, Any]

LARGEST = (1 << 256) - 1
UINT256 = st.one_of(
    st.integers(0, LARGEST),
    st.integers(0, 10),
    st.integers(LARGEST - 10, LARGEST),
    st.integers(2**53 - 2, 2**65),
)
FEES = st.one_of(
    st.integers(0, 10**38 - 1), st.integers(2**63 - 2, 2**64 + 2), st.sampled_from([10**38 - 1, 0])
)
GAS = st.one_of(st.integers(0, 2**63 - 1), st.integers(2**31 - 2, 2**32 + 2))


def raw_of(value: str | None) -> bytes | None:
    return None if value is None else bytes.fromhex(value[2:])


def number_of(value: str | None) -> int | None:
    return None if value is None else int(value, 16)


def word_of(value: str) -> bytes:
    return int(value, 16).to_bytes(32, "big")


def parts_of(name: str, value: str | None) -> Json:
    """A uint256, told plainly."""
    return stored_integer(name, number_of(value))


def every_table_of(raw: RawBlock) -> Json:
    return {
        "chain_id": CHAIN_ID,
        "block_number": raw.number,
        "block_hash": raw_of(raw.block["hash"]),
        "timestamp": datetime.fromtimestamp(int(raw.block["timestamp"], 16), UTC),
    }


def transaction_rows(raw: RawBlock) -> list[Json]:
    pairs = zip(raw.block["transactions"], raw.receipts or [], strict=True)
    return [every_table_of(raw) | transaction_row(tx, receipt) for tx, receipt in pairs]


def transaction_row(tx: Json, receipt: Json) -> Json:
    data = bytes.fromhex(tx["input"][2:])
    v = int(tx["v"], 16)
    return parts_of("value", tx["value"]) | {
        "transaction_index": number_of(tx["transactionIndex"]),
        "transaction_hash": raw_of(tx["hash"]),
        "transaction_type": number_of(tx["type"]),
        "nonce": number_of(tx["nonce"]),
        "from_address": raw_of(tx["from"]),
        "to_address": raw_of(tx["to"]),
        "input": data,
        "n_input_bytes": len(data),
        "n_input_zero_bytes": data.count(0),
        "n_input_nonzero_bytes": len(data) - data.count(0),
        "gas_limit": number_of(tx["gas"]),
        "gas_used": number_of(receipt["gasUsed"]),
        "cumulative_gas_used": number_of(receipt["cumulativeGasUsed"]),
        "gas_price": number_of(tx["gasPrice"]),
        "effective_gas_price": number_of(receipt["effectiveGasPrice"]),
        "max_priority_fee_per_gas": number_of(tx.get("maxPriorityFeePerGas")),
        "max_fee_per_gas": number_of(tx.get("maxFeePerGas")),
        "max_fee_per_blob_gas": number_of(tx.get("maxFeePerBlobGas")),
        "blob_gas_used": number_of(receipt.get("blobGasUsed")),
        "blob_gas_price": number_of(receipt.get("blobGasPrice")),
        "blob_versioned_hashes": hashes_of(tx.get("blobVersionedHashes")),
        "access_list": access_of(tx.get("accessList")),
        "authorization_list": authorizations_of(tx.get("authorizationList")),
        "success": receipt["status"] == "0x1",
        "contract_address": raw_of(receipt["contractAddress"]),
        "v": v,
        "r": word_of(tx["r"]),
        "s": word_of(tx["s"]),
        "y_parity": (v - 35) % 2 if v >= 35 else v,
    }


def hashes_of(hashes: list[str] | None) -> list[bytes | None] | None:
    return None if hashes is None else [raw_of(one) for one in hashes]


def access_of(entries: list[Json] | None) -> list[Json] | None:
    if entries is None:
        return None
    return [
        {"address": raw_of(one["address"]), "storage_keys": hashes_of(one["storageKeys"])} for one in entries
    ]


def authorizations_of(entries: list[Json] | None) -> list[Json] | None:
    if entries is None:
        return None
    return [
        {
            "chain_id": str(int(one["chainId"], 16)),
            "address": raw_of(one["address"]),
            "nonce": Decimal(int(one["nonce"], 16)),
            "y_parity": int(one["yParity"], 16),
            "r": word_of(one["r"]),
            "s": word_of(one["s"]),
        }
        for one in entries
    ]


def log_rows(raw: RawBlock) -> list[Json]:
    return [every_table_of(raw) | log_row(log) for receipt in raw.receipts or [] for log in receipt["logs"]]


def log_row(log: Json) -> Json:
    topics = [raw_of(topic) for topic in log["topics"]]
    return {f"topic{place}": topics[place] if place < len(topics) else None for place in range(4)} | {
        "transaction_index": number_of(log["transactionIndex"]),
        "log_index": number_of(log["logIndex"]),
        "transaction_hash": raw_of(log["transactionHash"]),
        "address": raw_of(log["address"]),
        "data": raw_of(log["data"]),
    }


def check(raws: list[RawBlock], dataset: ChainTable, rows: list[Json]) -> pa.RecordBatch:
    batch = decode(raws, dataset, CHAIN_ID)
    batch.validate(full=True)
    assert batch.schema.equals(TABLES[dataset].arrow, check_metadata=True)
    expected = [{"wide_values": None} | row for row in rows]
    assert batch.to_pylist() == [{name: row[name] for name in batch.schema.names} for row in expected]
    return batch


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 3))
def test_tables_of_blocks_of_every_type_say_what_the_blocks_say(
    seed: int, sizes: list[int], logs: int
) -> None:
    rng = random.Random(seed)
    raws = [made_block(rng, 100 + place, transactions=size, logs=logs) for place, size in enumerate(sizes)]
    check(raws, ChainTable.TRANSACTIONS, [row for raw in raws for row in transaction_rows(raw)])
    check(raws, ChainTable.LOGS, [row for raw in raws for row in log_rows(raw)])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(UINT256, FEES, GAS, FEES), min_size=1, max_size=6))
def test_numbers_of_any_size_come_back_exact(numbers: list[tuple[int, int, int, int]]) -> None:
    raw = made_block(random.Random(1), 8, transactions=len(numbers), kinds=("0x2",))
    pairs = list(zip(raw.block["transactions"], raw.receipts or [], strict=True))
    for (tx, receipt), (value, fee, gas, price) in zip(pairs, numbers, strict=True):
        tx |= {"value": hex(value), "maxFeePerGas": hex(fee), "gas": hex(gas), "gasPrice": hex(price)}
        tx |= {"r": hex(value), "maxPriorityFeePerGas": hex(fee)}
        receipt |= {"effectiveGasPrice": hex(price), "gasUsed": hex(gas)}
    check([raw], ChainTable.TRANSACTIONS, transaction_rows(raw))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(max_size=80), st.lists(st.binary(min_size=32, max_size=32), max_size=4)),
        max_size=9,
    )
)
def test_logs_of_any_shape_come_back_exact(contents: list[tuple[bytes, list[bytes]]]) -> None:
    raw = made_block(random.Random(1), 8, transactions=1, logs=len(contents))
    for log, (data, topics) in zip((raw.receipts or [])[0]["logs"], contents, strict=True):
        log |= {"data": "0x" + data.hex(), "topics": ["0x" + topic.hex() for topic in topics]}
    check([raw], ChainTable.LOGS, log_rows(raw))


def test_a_double_is_the_nearest_one() -> None:
    raw = made_block(random.Random(1), 8, transactions=3, kinds=("0x0",))
    for tx, value in zip(raw.block["transactions"], [2**53 + 1, 2**256 - 1, 3 * 2**200 + 1], strict=True):
        tx["value"] = hex(value)
    batch = decode([raw], ChainTable.TRANSACTIONS, CHAIN_ID)
    assert batch["value_f64"].to_pylist() == [9007199254740992.0, 1.157920892373162e77, float(3 * 2**200 + 1)]


def test_binary_numbers_sort_as_the_numbers_do() -> None:
    raw = made_block(random.Random(1), 8, transactions=5, kinds=("0x0",))
    for tx, value in zip(raw.block["transactions"], [10**30, 255, 2**256 - 1, 256, 0], strict=True):
        tx["value"] = hex(value)
    rows = decode([raw], ChainTable.TRANSACTIONS, CHAIN_ID).to_pylist()
    assert [int(row["value_string"]) for row in sorted(rows, key=lambda row: row["value_binary"])] == [
        *(0, 255, 256, 10**30),
        2**256 - 1,
    ]


def test_blocks_say_what_their_headers_say() -> None:
    raws = [made_block(random.Random(number), number, transactions=2) for number in (5, 6)]
    for raw in raws:
        raw.block.update(blockAccessListHash="0x" + "5a" * 32, slotNumber=hex(2**40 + raw.number))
    raws[1].block["totalDifficulty"] = None
    raws[1].block["uncles"] = ["0x" + "ab" * 32]
    check(raws, ChainTable.BLOCKS, [block_row(raw) for raw in raws])


def block_row(raw: RawBlock) -> Json:
    block = raw.block
    plain = {
        "parent_hash": "parentHash",
        "author": "miner",
        "extra_data": "extraData",
        "logs_bloom": "logsBloom",
        "state_root": "stateRoot",
        "transactions_root": "transactionsRoot",
        "receipts_root": "receiptsRoot",
        "withdrawals_root": "withdrawalsRoot",
        "uncles_hash": "sha3Uncles",
        "mix_hash": "mixHash",
        "nonce": "nonce",
        "parent_beacon_block_root": "parentBeaconBlockRoot",
        "requests_hash": "requestsHash",
        "block_access_list_hash": "blockAccessListHash",
    }
    numbers = {
        "gas_limit": "gasLimit",
        "gas_used": "gasUsed",
        "base_fee_per_gas": "baseFeePerGas",
        "blob_gas_used": "blobGasUsed",
        "excess_blob_gas": "excessBlobGas",
        "size": "size",
        "slot_number": "slotNumber",
    }
    return {
        **every_table_of(raw),
        **{name: raw_of(block[key]) for name, key in plain.items()},
        **{name: number_of(block[key]) for name, key in numbers.items()},
        **parts_of("difficulty", block["difficulty"]),
        **parts_of("total_difficulty", block["totalDifficulty"]),
        "uncles": hashes_of(block["uncles"]),
        "transaction_count": len(block["transactions"]),
        "withdrawal_count": len(block["withdrawals"]),
    }


def test_a_header_of_the_first_fork_leaves_the_later_columns_null() -> None:
    raw = made_block(random.Random(1), 8, transactions=0, withdrawals=0)
    for name in (
        "baseFeePerGas",
        "withdrawalsRoot",
        "withdrawals",
        "blobGasUsed",
        "excessBlobGas",
        "requestsHash",
    ):
        del raw.block[name]
    [row] = decode([raw], ChainTable.BLOCKS, CHAIN_ID).to_pylist()
    assert [
        row[name] for name in ("base_fee_per_gas", "withdrawals_root", "withdrawal_count", "requests_hash")
    ] == ([None] * 4)


def test_receipts_and_withdrawals_say_what_the_node_says() -> None:
    raw = made_block(random.Random(4), 8, transactions=7, logs=2)
    rows = decode([raw], ChainTable.RECEIPTS, CHAIN_ID).to_pylist()
    for row, receipt in zip(rows, raw.receipts or [], strict=True):
        assert row["transaction_hash"] == raw_of(receipt["transactionHash"])
        assert row["logs_bloom"] == raw_of(receipt["logsBloom"])
        assert row["log_count"] == 2
        assert row["root"] is None
    rows = decode([raw], ChainTable.WITHDRAWALS, CHAIN_ID).to_pylist()
    assert [row["amount"] for row in rows] == [int(one["amount"], 16) for one in raw.block["withdrawals"]]
    assert [row["address"] for row in rows] == [raw_of(one["address"]) for one in raw.block["withdrawals"]]


def test_a_receipt_of_before_byzantium_has_a_root_and_no_success() -> None:
    raw = made_block(random.Random(4), 8, transactions=1, kinds=("0x0",))
    receipt = (raw.receipts or [])[0]
    receipt["root"] = "0x" + "cd" * 32
    del receipt["status"]
    [row] = decode([raw], ChainTable.RECEIPTS, CHAIN_ID).to_pylist()
    assert (row["root"], row["success"]) == (bytes.fromhex("cd" * 32), None)


def test_an_erc_20_transfer_has_three_topics_and_an_erc_721_transfer_four() -> None:
    raw = made_block(random.Random(4), 8, transactions=30, logs=4)
    rows = decode([raw], ChainTable.LOGS, CHAIN_ID).to_pylist()
    assert {row["topic0"].hex() for row in rows} == {TRANSFER[2:]}
    fungible = [row for row in rows if row["topic3"] is None]
    unique = [row for row in rows if row["topic3"] is not None]
    assert fungible
    assert unique
    assert {len(row["data"]) for row in fungible} == {32}
    assert {len(row["data"]) for row in unique} == {0}


def test_clients_that_answer_differently_give_the_same_rows() -> None:
    raw = made_block(random.Random(4), 8, transactions=12)
    other = copy.deepcopy(raw)
    for tx, receipt in zip(other.block["transactions"], other.receipts or [], strict=True):
        tx["firstSeen"] = "whatever"
        receipt["blobGasPrice"] = receipt.get("blobGasPrice", "0x1")
        if tx["type"] == "0x0":
            tx |= {"accessList": [], "yParity": "0x0"}
            del tx["type"]
            del receipt["type"]
        else:
            del tx["v"]
        if "maxFeePerGas" in tx:
            tx["gasPrice"] = tx["maxFeePerGas"]
    for dataset in (ChainTable.TRANSACTIONS, ChainTable.RECEIPTS):
        assert decode([other], dataset, CHAIN_ID).equals(decode([raw], dataset, CHAIN_ID))


def test_rows_come_in_order_whatever_order_the_answer_has() -> None:
    raws = [made_block(random.Random(number), number, transactions=4, logs=2) for number in (3, 4)]
    for dataset in (
        ChainTable.BLOCKS,
        ChainTable.TRANSACTIONS,
        ChainTable.LOGS,
        ChainTable.RECEIPTS,
        ChainTable.WITHDRAWALS,
    ):
        right = decode(raws, dataset, CHAIN_ID)
        mixed = copy.deepcopy(raws[::-1])
        for raw in mixed:
            raw.block["transactions"].reverse()
            raw.block["withdrawals"].reverse()
            (raw.receipts or []).reverse()
        assert decode(mixed, dataset, CHAIN_ID).equals(right)


@pytest.mark.parametrize("dataset", list(ChainTable))
def test_no_blocks_and_empty_blocks_give_empty_tables(dataset: ChainTable) -> None:
    assert decode([], dataset, CHAIN_ID).schema.equals(TABLES[dataset].arrow)
    raw = made_block(random.Random(1), 8, transactions=0, withdrawals=0)
    empty = RawBlock(8, raw.block, [], [], "made")
    assert decode([empty], dataset, CHAIN_ID).num_rows == (1 if dataset is ChainTable.BLOCKS else 0)


def test_transactions_without_receipts_leave_the_outcome_null() -> None:
    raw = made_block(random.Random(1), 8, transactions=3)
    rows = decode([RawBlock(8, raw.block, None, None, "made")], ChainTable.TRANSACTIONS, CHAIN_ID).to_pylist()
    assert {row["gas_used"] for row in rows} == {None}
    assert {row["success"] for row in rows} == {None}
    assert all(row["gas_price"] is not None for row in rows)


def test_logs_and_traces_that_were_not_asked_for_cannot_be_decoded() -> None:
    raw = made_block(random.Random(1), 8, transactions=1)
    with pytest.raises(Invalid, match="block 8 has none"):
        decode([RawBlock(8, raw.block, None, None, "made")], ChainTable.LOGS, CHAIN_ID)
    with pytest.raises(Invalid, match="block 8 was fetched without"):
        decode([raw], ChainTable.TRACES, CHAIN_ID)


TRACES: list[Json] = [
    {
        "type": "call",
        "action": {
            "from": "0x" + "01" * 20,
            "to": "0x" + "02" * 20,
            "callType": "delegatecall",
            "gas": "0xffffffffff",
            "input": "0x1234",
            "value": hex(LARGEST),
        },
        "result": {"gasUsed": "0x10", "output": "0x"},
        "subtraces": 1,
        "traceAddress": [],
        "transactionHash": "0x" + "aa" * 32,
        "transactionPosition": 0,
    },
    {
        "type": "create",
        "action": {"from": "0x" + "02" * 20, "gas": "0x5", "init": "0x60", "value": "0x0"},
        "error": "out of gas",
        "subtraces": 0,
        "traceAddress": [0, 12],
        "transactionHash": "0x" + "aa" * 32,
        "transactionPosition": 0,
    },
    {
        "type": "suicide",
        "action": {"address": "0x" + "03" * 20, "refundAddress": "0x" + "04" * 20, "balance": "0x7"},
        "result": None,
        "subtraces": 0,
        "traceAddress": [1],
        "transactionHash": "0x" + "aa" * 32,
        "transactionPosition": 0,
    },
    {
        "type": "reward",
        "action": {"author": "0x" + "05" * 20, "rewardType": "block", "value": "0x1"},
        "result": None,
        "subtraces": 0,
        "traceAddress": [],
    },
]


def test_traces_of_every_kind_become_rows() -> None:
    raw = made_block(random.Random(1), 8, transactions=1)
    rows = decode([RawBlock(8, raw.block, None, TRACES, "made")], ChainTable.TRACES, CHAIN_ID).to_pylist()
    call, create, suicide, reward = rows
    assert [row["trace_index"] for row in rows] == [0, 1, 2, 3]
    assert (call["action_call_type"], call["action_gas"]) == ("delegatecall", 0xFFFFFFFFFF)
    assert (call["action_value_string"], call["result_output"]) == (str(LARGEST), b"")
    assert (create["trace_address"], create["error"], create["action_init"]) == (
        "0_12",
        "out of gas",
        b"\x60",
    )
    assert (suicide["action_from"], suicide["action_to"]) == (b"\x03" * 20, b"\x04" * 20)
    assert (suicide["action_value_string"], suicide["transaction_index"]) == ("7", 0)
    assert (reward["action_to"], reward["transaction_hash"], reward["transaction_index"]) == (
        b"\x05" * 20,
        None,
        None,
    )


BAD: list[Any] = [
    None,
    7,
    -1,
    "",
    "0x",
    "12",
    "0xzz",
    "0x-1",
    "0x 1",
    "0x1_0",
    "-0x1",
    "0x" + "f" * 66,
    [],
    {},
    True,
    "0x１",
]
FIELDS = [
    (ChainTable.BLOCKS, ("block", "gasLimit"), "gasLimit"),
    (ChainTable.BLOCKS, ("block", "parentHash"), "parentHash"),
    (ChainTable.BLOCKS, ("block", "logsBloom"), "logsBloom"),
    (ChainTable.LOGS, ("block", "timestamp"), "timestamp"),
    (ChainTable.LOGS, ("block", "hash"), "hash"),
    (ChainTable.TRANSACTIONS, ("block", "transactions", 2, "value"), "transactions[2].value"),
    (ChainTable.TRANSACTIONS, ("block", "transactions", 2, "gas"), "transactions[2].gas"),
    (ChainTable.TRANSACTIONS, ("block", "transactions", 2, "hash"), "transactions[2].hash"),
    (ChainTable.TRANSACTIONS, ("receipts", 2, "gasUsed"), "receipts[2].gasUsed"),
    (ChainTable.RECEIPTS, ("receipts", 1, "transactionIndex"), "receipts[1].transactionIndex"),
    (ChainTable.LOGS, ("receipts", 1, "logs", 1, "address"), "logs[3].address"),
    (ChainTable.LOGS, ("receipts", 1, "logs", 1, "logIndex"), "logs[3].logIndex"),
    (ChainTable.WITHDRAWALS, ("block", "withdrawals", 1, "amount"), "withdrawals[1].amount"),
]


def spoiled(path: tuple[Any, ...], value: Any) -> list[RawBlock]:
    """Two good blocks, and one between them with a bad value."""
    raws = [made_block(random.Random(number), number, transactions=3, logs=2) for number in (7, 8, 9)]
    target: Any = {"block": raws[1].block, "receipts": raws[1].receipts}
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return [raws[0], RawBlock(8, raws[1].block, raws[1].receipts, None, "second"), raws[2]]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize(("dataset", "path", "field"), FIELDS, ids=[field for _, _, field in FIELDS])
def test_a_field_that_cannot_be_is_refused_with_block_endpoint_and_place(
    dataset: ChainTable, path: tuple[Any, ...], field: str, value: Any
) -> None:
    with pytest.raises(BlockMalformed) as found:
        decode(spoiled(path, value), dataset, CHAIN_ID)
    assert (found.value.number, found.value.endpoint, found.value.field) == (8, "second", field)
    assert isinstance(found.value, Invalid), "the same answer comes the next time"


WIDE: list[tuple[ChainTable, tuple[Any, ...], str, int]] = [
    (ChainTable.BLOCKS, ("block", "gasLimit"), "gas_limit", 2**64 - 1),
    (ChainTable.BLOCKS, ("block", "baseFeePerGas"), "base_fee_per_gas", 10**38),
    (ChainTable.TRANSACTIONS, ("block", "transactions", 1, "gas"), "gas_limit", 2**63),
    (ChainTable.TRANSACTIONS, ("block", "transactions", 1, "nonce"), "nonce", 2**64 - 3),
    (ChainTable.TRANSACTIONS, ("receipts", 1, "cumulativeGasUsed"), "cumulative_gas_used", 2**256 - 1),
    (ChainTable.RECEIPTS, ("receipts", 1, "effectiveGasPrice"), "effective_gas_price", 2**200),
    (ChainTable.WITHDRAWALS, ("block", "withdrawals", 1, "amount"), "amount", 2**64 - 1),
]


@pytest.mark.parametrize(("dataset", "path", "column", "number"), WIDE)
def test_a_number_beyond_its_column_is_kept_exact_beside_it(
    dataset: ChainTable, path: tuple[Any, ...], column: str, number: int
) -> None:
    batch = decode(spoiled(path, hex(number)), dataset, CHAIN_ID)
    batch.validate(full=True)
    [row] = [row for row in batch.to_pylist() if row["wide_values"] is not None]
    assert (row["block_number"], row[column]) == (8, None)
    assert orjson.loads(row["wide_values"]) == {column: str(number)}
    table = pa.Table.from_batches([batch])
    assert TABLES[dataset].from_hot(TABLES[dataset].to_hot(table)).equals(table)


def test_a_wide_price_that_was_only_offered_is_not_the_price() -> None:
    """Clients report the paid or the offered price of a transaction with fees."""
    raw = made_block(random.Random(1), 8, transactions=1, kinds=("0x2",))
    [tx] = raw.block["transactions"]
    paid = decode([raw], ChainTable.TRANSACTIONS, CHAIN_ID).column("gas_price")
    tx["maxFeePerGas"] = tx["gasPrice"] = hex(2**200)
    offered = decode([raw], ChainTable.TRANSACTIONS, CHAIN_ID)
    assert offered.column("gas_price").equals(paid)
    assert offered.column("wide_values").to_pylist() == [f'{{"max_fee_per_gas":"{2**200}"}}']


def test_a_signature_for_a_chain_beyond_62_bits_keeps_its_parity() -> None:
    raw = made_block(random.Random(1), 8, transactions=1, kinds=("0x0",))
    raw.block["transactions"][0]["v"] = hex(35 + 2 * 2**63 + 1)
    [row] = decode([raw], ChainTable.TRANSACTIONS, CHAIN_ID).to_pylist()
    assert (row["v"], row["y_parity"], row["wide_values"]) == (None, 1, f'{{"v":"{36 + 2**64}"}}')


@pytest.mark.parametrize(
    ("dataset", "path", "value", "problem"),
    [
        (ChainTable.TRANSACTIONS, ("block", "transactions", 0, "value"), hex(1 << 256), "too large"),
        (ChainTable.TRANSACTIONS, ("block", "transactions", 0, "gas"), hex(1 << 256), "too large"),
        (ChainTable.TRANSACTIONS, ("block", "transactions", 0, "type"), hex(1 << 63), "too large"),
        (ChainTable.TRANSACTIONS, ("block", "transactions", 0, "r"), hex(1 << 256), "too large"),
        (ChainTable.TRANSACTIONS, ("block", "transactions", 0, "to"), "0x1234", "2 bytes instead of 20"),
        (ChainTable.TRANSACTIONS, ("block", "transactions", 0, "input"), "0x123", "isn't hexadecimal bytes"),
        (ChainTable.TRANSACTIONS, ("receipts", 0, "status"), "0x2", "neither 0x0 nor 0x1"),
        (ChainTable.TRANSACTIONS, ("block", "transactions"), "0x", "isn't a list of objects"),
        (ChainTable.TRANSACTIONS, ("block", "transactions"), ["0x" + "00" * 32], "isn't a list of objects"),
        (ChainTable.TRANSACTIONS, ("receipts", 0), None, "isn't a list of objects"),
        (ChainTable.LOGS, ("receipts", 0, "logs"), None, "is missing"),
        (ChainTable.LOGS, ("receipts", 0, "logs", 0, "topics"), ["0x" + "00" * 32] * 5, "more than 4 topics"),
        (ChainTable.LOGS, ("receipts", 0, "logs", 0, "topics"), ["0x00"], "1 bytes instead of 32"),
        (ChainTable.LOGS, ("receipts", 0, "logs", 0, "topics"), "0x", "isn't a list"),
        (ChainTable.BLOCKS, ("block", "uncles"), ["0x12"], "has an entry that has 1 bytes"),
        (ChainTable.BLOCKS, ("block", "uncles"), "0x12", "isn't a list"),
        (ChainTable.BLOCKS, ("block", "timestamp"), hex(1 << 62), "too large"),
    ],
)
def test_a_value_that_does_not_fit_says_why(
    dataset: ChainTable, path: tuple[Any, ...], value: Any, problem: str
) -> None:
    with pytest.raises(BlockMalformed, match=problem) as found:
        decode(spoiled(path, value), dataset, CHAIN_ID)
    assert (found.value.number, found.value.endpoint) == (8, "second")


@pytest.mark.parametrize(
    ("kind", "key", "value", "problem"),
    [
        ("0x1", "accessList", [{"address": "0x12", "storageKeys": []}], "2 bytes|1 bytes instead of 20"),
        ("0x1", "accessList", [{"storageKeys": []}], "lacks one of address, storageKeys"),
        ("0x1", "accessList", [7], "lacks one of address, storageKeys"),
        ("0x3", "blobVersionedHashes", [None], "empty entry"),
        ("0x4", "authorizationList", [{"chainId": "0x1"}], "lacks one of chainId, address, nonce"),
    ],
)
def test_a_bad_entry_of_a_list_is_refused(kind: str, key: str, value: Any, problem: str) -> None:
    raw = made_block(random.Random(1), 8, transactions=3, kinds=(kind,))
    raw.block["transactions"][1][key] = value
    with pytest.raises(BlockMalformed, match=problem) as found:
        decode([raw], ChainTable.TRANSACTIONS, CHAIN_ID)
    assert found.value.field == f"transactions[1].{key}"


def test_every_type_is_told_apart() -> None:
    raws = [made_block(random.Random(1), 8, transactions=2, kinds=(kind,)) for kind in EVERY_TYPE]
    kinds = [decode([raw], ChainTable.TRANSACTIONS, CHAIN_ID)["transaction_type"].to_pylist() for raw in raws]
    assert kinds == [[number, number] for number in range(5)]
