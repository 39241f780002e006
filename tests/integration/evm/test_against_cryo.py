"""The same random chains read by this project, by cryo 0.3.2 and by plain Python out of the node's JSON.

All three agree in every row and every column that two of them have. What isn't compared, and why:

- ``n_rlp_bytes`` of cryo's transactions has no column here, and is short for type 4: it leaves the authorization
  list out (by 107 to 110 bytes for the one entry that these have).
- Transactions from before Byzantium, whose receipts have no status: asked for a range with one of them in it, cryo
  writes no file and raises nothing. They are compared with the node alone.
- Types differ by definition, values don't: cryo's integers are unsigned and ``timestamp`` is seconds since 1970;
  here integers are signed, prices decimals and times times.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.anvil import Anvil, build_random_chain, running_anvil
from tests.support.wide_integers import stored_integer
from tracelake.domain.operators.decode_events import read_config
from tracelake.evm.abi.decode_logs import LogDecoder
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.raw_block import ChainTable, Verify
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.operators.decode_events.operator import decode_table

BLOCKS = 40
FRONTIER = 12
DATASETS = (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.LOGS)
TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"

# In a process of its own: it brings an async runtime and a thread pool along. That process leaves without cleaning
# up: the files are written, and a thread of the runtime that still lets go of Python now and then aborts it.
CRYO = """
import os
import sys
import cryo
dataset, blocks, url, folder = sys.argv[1:]
cryo.freeze(dataset, blocks=[blocks], rpc=url, output_dir=folder, chunk_size=100_000, include_columns=["all"],
            verbose=False, overwrite=True)
os._exit(0)
"""

# Its chains are built and read once.
pytestmark = pytest.mark.xdist_group("cryo")

Json = dict[str, Any]
Row = dict[str, Any]


class Chain(NamedTuple):
    """``frontier``: how many blocks at its beginning are from before Byzantium."""

    url: str
    chain_id: int
    frontier: int = 0


@contextmanager
def a_real_node() -> Iterator[Chain]:
    with running_anvil() as node:
        build_random_chain(node, seed=20, blocks=BLOCKS)
        yield Chain(node.url, int(node.call("eth_chainId"), 16))


@contextmanager
def a_dev_chain() -> Iterator[Chain]:
    with running(DevChain(seed=21, blocks=BLOCKS)) as served:
        yield Chain(served.url, served.chain.chain_id)


@contextmanager
def an_old_chain() -> Iterator[Chain]:
    with running(DevChain(seed=22, blocks=BLOCKS, forks=("frontier", f"osaka@{FRONTIER}"))) as served:
        yield Chain(served.url, served.chain.chain_id, frontier=FRONTIER)


@pytest.fixture(
    scope="module", params=[a_real_node, a_dev_chain, an_old_chain], ids=lambda make: make.__name__
)
def chain(request: pytest.FixtureRequest) -> Iterator[Chain]:
    with request.param() as made:
        yield made


class Tables(NamedTuple):
    """One chain, read three times."""

    ours: dict[ChainTable, pa.Table]
    by_cryo: dict[ChainTable, list[Row]]
    by_hand: dict[ChainTable, list[Row]]


@pytest.fixture(scope="module")
def tables(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return Tables(our_tables(chain), cryo_tables(chain, tmp_path_factory.mktemp("cryo")), plain_tables(chain))


def our_tables(chain: Chain) -> dict[ChainTable, pa.Table]:
    pool = Pool(pool_of(chain.url))
    try:
        raw = list(fetch_blocks(pool, range(BLOCKS + 1), receipts=True, verify=Verify.FULL))
        return {
            dataset: pa.Table.from_batches([decode(raw, dataset, pool.chain_id())]) for dataset in DATASETS
        }
    finally:
        pool.close()


def cryo_tables(chain: Chain, folder: Path) -> dict[ChainTable, list[Row]]:
    """Sorted; transactions only from the end of the frontier on."""
    found: dict[ChainTable, list[Row]] = {}
    for dataset in DATASETS:
        start = chain.frontier if dataset is ChainTable.TRANSACTIONS else 0
        arguments = (dataset.value, f"{start}:{BLOCKS + 1}", chain.url, str(folder))
        subprocess.run([sys.executable, "-c", CRYO, *arguments], check=True, timeout=120)
        [file] = folder.glob(f"*__{dataset}__*.parquet")
        order = [(name, "ascending") for name in TABLES[dataset].sort_by]
        found[dataset] = [with_time(row) for row in pq.read_table(file).sort_by(order).to_pylist()]
    return found


def with_time(row: Row) -> Row:
    if "timestamp" in row:
        row["timestamp"] = datetime.fromtimestamp(row["timestamp"], UTC)
    return row


def plain_tables(chain: Chain) -> dict[ChainTable, list[Row]]:
    node = Anvil(chain.url, 0)
    try:
        blocks = node.batch([("eth_getBlockByNumber", [hex(each), True]) for each in range(BLOCKS + 1)])
        receipts = node.batch([("eth_getBlockReceipts", [hex(each)]) for each in range(BLOCKS + 1)])
    finally:
        node.close()
    rows: dict[ChainTable, list[Row]] = {dataset: [] for dataset in DATASETS}
    for block, own in zip(blocks, receipts, strict=True):
        start = {
            "chain_id": chain.chain_id,
            "block_number": number(block["number"]),
            "block_hash": raw_bytes(block["hash"]),
            "timestamp": datetime.fromtimestamp(number(block["timestamp"]), UTC),
        }
        narrow = {"wide_values": None}
        rows[ChainTable.BLOCKS].append(start | block_row(block) | narrow)
        for transaction, receipt in zip(block["transactions"], own, strict=True):
            rows[ChainTable.TRANSACTIONS].append(start | transaction_row(transaction, receipt) | narrow)
            rows[ChainTable.LOGS] += [start | log_row(log) for log in receipt["logs"]]
    return rows


def number(digits: str) -> int:
    return int(digits, 16)


def raw_bytes(digits: str) -> bytes:
    return bytes.fromhex(digits.removeprefix("0x"))


def maybe(read: Callable[[str], Any], value: str | None) -> Any:
    return None if value is None else read(value)


def wei(digits: str) -> Decimal:
    return Decimal(number(digits))


def word(digits: str) -> bytes:
    return number(digits).to_bytes(32, "big")


def uint256(name: str, digits: str | None) -> Row:
    return stored_integer(name, maybe(number, digits))


def block_row(block: Json) -> Row:
    withdrawals = block.get("withdrawals")
    return {
        "parent_hash": raw_bytes(block["parentHash"]),
        "author": raw_bytes(block["miner"]),
        "gas_limit": number(block["gasLimit"]),
        "gas_used": number(block["gasUsed"]),
        "base_fee_per_gas": maybe(wei, block.get("baseFeePerGas")),
        "blob_gas_used": maybe(number, block.get("blobGasUsed")),
        "excess_blob_gas": maybe(number, block.get("excessBlobGas")),
        "extra_data": raw_bytes(block["extraData"]),
        "transaction_count": len(block["transactions"]),
        "withdrawal_count": None if withdrawals is None else len(withdrawals),
        "size": maybe(number, block.get("size")),
        **uint256("difficulty", block["difficulty"]),
        **uint256("total_difficulty", block.get("totalDifficulty")),
        "logs_bloom": raw_bytes(block["logsBloom"]),
        "state_root": raw_bytes(block["stateRoot"]),
        "transactions_root": raw_bytes(block["transactionsRoot"]),
        "receipts_root": raw_bytes(block["receiptsRoot"]),
        "withdrawals_root": maybe(raw_bytes, block.get("withdrawalsRoot")),
        "uncles_hash": raw_bytes(block["sha3Uncles"]),
        "uncles": [raw_bytes(uncle) for uncle in block["uncles"]],
        "mix_hash": maybe(raw_bytes, block.get("mixHash")),
        "nonce": maybe(raw_bytes, block.get("nonce")),
        "parent_beacon_block_root": maybe(raw_bytes, block.get("parentBeaconBlockRoot")),
        "requests_hash": maybe(raw_bytes, block.get("requestsHash")),
        "block_access_list_hash": maybe(raw_bytes, block.get("blockAccessListHash")),
        "slot_number": maybe(number, block.get("slotNumber")),
    }


def transaction_row(transaction: Json, receipt: Json) -> Row:
    kind, data = number(transaction["type"]), raw_bytes(transaction["input"])
    has_blobs = kind == 3
    return {
        "transaction_index": number(transaction["transactionIndex"]),
        "transaction_hash": raw_bytes(transaction["hash"]),
        "transaction_type": kind,
        "nonce": number(transaction["nonce"]),
        "from_address": raw_bytes(transaction["from"]),
        "to_address": maybe(raw_bytes, transaction["to"]),
        **uint256("value", transaction["value"]),
        "input": data,
        "n_input_bytes": len(data),
        "n_input_zero_bytes": data.count(0),
        "n_input_nonzero_bytes": len(data) - data.count(0),
        "gas_limit": number(transaction["gas"]),
        "gas_used": number(receipt["gasUsed"]),
        "cumulative_gas_used": number(receipt["cumulativeGasUsed"]),
        "gas_price": wei(transaction["gasPrice"]),
        "effective_gas_price": wei(receipt["effectiveGasPrice"]),
        "max_priority_fee_per_gas": maybe(wei, transaction.get("maxPriorityFeePerGas")),
        "max_fee_per_gas": maybe(wei, transaction.get("maxFeePerGas")),
        "max_fee_per_blob_gas": maybe(wei, transaction.get("maxFeePerBlobGas")),
        "blob_gas_used": number(receipt["blobGasUsed"]) if has_blobs else None,
        "blob_gas_price": wei(receipt["blobGasPrice"]) if has_blobs else None,
        "blob_versioned_hashes": (
            [raw_bytes(each) for each in transaction["blobVersionedHashes"]] if has_blobs else None
        ),
        "access_list": access_list(transaction["accessList"]) if kind else None,
        "authorization_list": authorizations(transaction["authorizationList"]) if kind == 4 else None,
        "success": {"0x1": True, "0x0": False, None: None}[receipt.get("status")],
        "contract_address": maybe(raw_bytes, receipt.get("contractAddress")),
        "v": number(transaction["v"] if "v" in transaction else transaction["yParity"]),
        "r": word(transaction["r"]),
        "s": word(transaction["s"]),
        "y_parity": number(transaction["yParity"]) if kind else parity(number(transaction["v"])),
    }


def parity(v: int) -> int:
    """27 or 28, and since EIP-155 35 or 36 and twice the chain id."""
    return v - 27 if v in (27, 28) else (v - 35) % 2


def access_list(entries: list[Json]) -> list[Row]:
    return [
        {
            "address": raw_bytes(each["address"]),
            "storage_keys": [raw_bytes(key) for key in each["storageKeys"]],
        }
        for each in entries
    ]


def authorizations(entries: list[Json]) -> list[Row]:
    return [
        {
            "chain_id": str(number(each["chainId"])),
            "address": raw_bytes(each["address"]),
            "nonce": wei(each["nonce"]),
            "y_parity": number(each["yParity"]),
            "r": word(each["r"]),
            "s": word(each["s"]),
        }
        for each in entries
    ]


def log_row(log: Json) -> Row:
    topics = [raw_bytes(topic) for topic in log["topics"]] + [None] * 4
    return {
        "transaction_index": number(log["transactionIndex"]),
        "log_index": number(log["logIndex"]),
        "transaction_hash": raw_bytes(log["transactionHash"]),
        "address": raw_bytes(log["address"]),
        **{f"topic{place}": topics[place] for place in range(4)},
        "data": raw_bytes(log["data"]),
    }


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_value_is_the_node_s(tables: Tables, dataset: ChainTable) -> None:
    rows = tables.ours[dataset].to_pylist()
    assert len(rows) == len(tables.by_hand[dataset]) > BLOCKS
    for ours, expected in zip(rows, tables.by_hand[dataset], strict=True):
        assert ours == expected


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_column_that_cryo_has_is_cryo_s_row_by_row(
    chain: Chain, tables: Tables, dataset: ChainTable
) -> None:
    first = chain.frontier if dataset is ChainTable.TRANSACTIONS else 0
    rows = [row for row in tables.ours[dataset].to_pylist() if row["block_number"] >= first]
    assert len(rows) == len(tables.by_cryo[dataset]) > 0
    for ours, theirs in zip(rows, tables.by_cryo[dataset], strict=True):
        assert set(theirs) - set(ours) <= {"n_rlp_bytes"}
        assert {name: ours[name] for name in theirs if name in ours} == {
            name: value for name, value in theirs.items() if name in ours
        }


def test_the_chains_have_what_tables_get_wrong(chain: Chain, tables: Tables) -> None:
    """Equality of tables says little if they hold nothing special."""
    transactions = tables.by_hand[ChainTable.TRANSACTIONS]
    types = {row["transaction_type"] for row in transactions}
    assert {0, 1, 2, 4} <= types
    assert {row["success"] for row in transactions} == {True, False} | ({None} if chain.frontier else set())
    assert any(row["to_address"] is None and row["contract_address"] for row in transactions)
    assert max(int(row["value_string"]) for row in transactions) > 2**192
    assert {row["transaction_count"] == 0 for row in tables.by_hand[ChainTable.BLOCKS]} == {True, False}
    shapes = {
        tuple(row[f"topic{place}"] is not None for place in range(4))
        for row in tables.by_hand[ChainTable.LOGS]
    }
    assert len(shapes) >= 4


def test_transfers_of_coins_and_of_collections_are_told_apart(tables: Tables) -> None:
    """Both begin with the same topic; an ERC-721 transfer has the token's id as a third indexed argument."""
    logs = [row for row in tables.by_hand[ChainTable.LOGS] if row["topic0"] == raw_bytes(TRANSFER)]
    coins = [row for row in logs if topics(row) == 3 and len(row["data"]) == 32]
    collections = [row for row in logs if topics(row) == 4 and not row["data"]]
    others = len(logs) - len(coins) - len(collections)
    assert coins
    assert collections
    assert others

    decoded, skipped = transfers(tables, "erc20_transfers")
    assert [key(row) for row in decoded] == [
        (*key_of(row), int.from_bytes(row["data"], "big")) for row in coins
    ]
    assert skipped == len(collections) + others

    decoded, skipped = transfers(tables, "erc721_transfers")
    assert [key(row, "token_id") for row in decoded] == [
        (*key_of(row), int.from_bytes(row["topic3"], "big")) for row in collections
    ]
    assert skipped == len(coins) + others


def test_both_kinds_of_transfers_in_one_table_are_those_of_two(tables: Tables) -> None:
    both, _ = transfers(tables, "erc20_transfers", "erc721_transfers")
    assert [
        row for row in both if row["value_string"] is not None and row["token_id_string"] is not None
    ] == []
    for preset, amount in (("erc20_transfers", "value"), ("erc721_transfers", "token_id")):
        alone, _ = transfers(tables, preset)
        assert [key(row, amount) for row in both if row[f"{amount}_string"] is not None] == [
            key(row, amount) for row in alone
        ]


def transfers(tables: Tables, *presets: str) -> tuple[list[Row], int]:
    """Decoded by the operator's own code, in the order of the chain; and how many were skipped."""
    config = read_config({"events": list(presets)})
    logs = tables.ours[ChainTable.LOGS]
    rows, skipped = decode_table(logs, LogDecoder.of(config.events, config.addresses, logs.column_names))
    ordered = rows.sort_by([("block_number", "ascending"), ("log_index", "ascending")])
    return ordered.to_pylist(), sum(skipped.values())


def topics(row: Row) -> int:
    return sum(row[f"topic{place}"] is not None for place in range(4))


def key(row: Row, amount: str = "value") -> tuple[Any, ...]:
    value = int(row[f"{amount}_string"])
    assert value == int.from_bytes(row[f"{amount}_binary"], "big")
    assert row[f"{amount}_f64"] == float(value)
    place = (
        row["block_number"],
        row["block_hash"],
        row["log_index"],
        row["transaction_hash"],
        row["address"],
    )
    return (*place, row["from_address"], row["to_address"], value)


def key_of(log: Row) -> tuple[Any, ...]:
    place = (
        log["block_number"],
        log["block_hash"],
        log["log_index"],
        log["transaction_hash"],
        log["address"],
    )
    return (*place, log["topic1"][12:], log["topic2"][12:])
