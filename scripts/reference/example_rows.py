"""Example rows for the pages, made by the operators' own code on the deterministic dev chain: the same on every
machine.

The rows of ``sql_transform`` need Spark, so they are written here, and a test runs the example job to compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any
from uuid import UUID

import pyarrow as pa

from tracelake.contracts.dispatcher_api import JobRef, PayloadInput, PayloadOutput, TaskPayload
from tracelake.contracts.rpc_pool import EndpointConfig, PoolConfig
from tracelake.domain.operators.decode_events import read_config
from tracelake.evm.abi.decode_logs import LogDecoder
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.raw_block import ChainTable, RawBlock, Verify
from tracelake.evm.rpc.pool import Pool
from tracelake.operators import in_process
from tracelake.operators.decode_events.operator import decode_table

SEED = 7
BLOCKS = 12
ROWS = 3
SHOWN: Mapping[ChainTable, tuple[str, ...]] = {
    ChainTable.BLOCKS: ("block_number", "block_hash", "timestamp", "gas_used", "transaction_count"),
    ChainTable.TRANSACTIONS: ("block_number", "transaction_hash", "from_address", "value_string", "success"),
    ChainTable.LOGS: ("block_number", "log_index", "address", "topic0", "data"),
    ChainTable.RECEIPTS: ("block_number", "transaction_hash", "success", "gas_used", "log_count"),
    ChainTable.WITHDRAWALS: ("block_number", "withdrawal_index", "validator_index", "address", "amount"),
    ChainTable.TRACES: ("block_number", "trace_address", "action_type", "action_from", "result_gas_used"),
}
TRANSFERS = ("block_number", "log_index", "address", "event", "from_address", "to_address", "value_string")


@dataclass(frozen=True, slots=True)
class ExampleRows:
    """Some columns of the first rows; ``left_out`` is the number of other columns."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    left_out: int


def chain_rows(dataset: ChainTable) -> ExampleRows:
    return _some(chain_table(dataset), SHOWN[dataset])


def transfer_rows() -> ExampleRows:
    return _some(transfers(), TRANSFERS)


def chain_table(dataset: ChainTable) -> pa.Table:
    raw, chain_id = _blocks()
    return pa.Table.from_batches([decode(raw, dataset, chain_id)])


def transfers() -> pa.Table:
    """The rows that ``decode_events`` makes of the chain's logs, without Spark."""
    config = read_config({"events": "erc20_transfers"})
    logs = chain_table(ChainTable.LOGS)
    decoded, _ = decode_table(logs, LogDecoder.of(config.events, config.addresses, logs.column_names))
    return decoded.sort_by([("block_number", "ascending"), ("log_index", "ascending")])


def chunks(start: int, end: int, chunk_size: int) -> list[str]:
    read = PayloadInput(0, UUID(int=0), UUID(int=0), 0, None, "none", start=start, end=end)
    task = _task({"chunk_size": chunk_size}, read)
    return [f"{event.start}–{event.end}" for event in in_process.split_range(task)]


def ranges(upto: int, finalized: int, range_size: int) -> list[str]:
    read = PayloadInput(
        0, UUID(int=0), UUID(int=0), 0, None, "none", after=-1, upto=upto, finalized=finalized
    )
    task = _task({"range_size": range_size}, read)
    return [f"{event.start}–{event.end}" for event in in_process.aggregate_ranges(task, None)]


@cache
def _blocks() -> tuple[list[RawBlock], int]:
    with _pool() as pool:
        found = fetch_blocks(pool, range(BLOCKS), receipts=True, traces=True, verify=Verify.FULL)
        return list(found), pool.chain_id()


@contextmanager
def _pool() -> Iterator[Pool]:
    with running(DevChain(seed=SEED, blocks=BLOCKS)) as node:
        endpoint = EndpointConfig(name="devchain", url=node.url)
        with Pool(PoolConfig(name="example", endpoints=(endpoint,))) as pool:
            yield pool


def _some(table: pa.Table, columns: tuple[str, ...]) -> ExampleRows:
    picked = table.select(list(columns)).slice(0, ROWS).to_pylist()
    rows = [tuple(shown(value) for value in row.values()) for row in picked]
    return ExampleRows(columns, rows, len(table.column_names) - len(columns))


def shown(value: Any) -> str:
    """Shorten long values."""
    match value:
        case None:
            return ""
        case bytes():
            text = "0x" + value.hex()
            return text if len(text) <= 12 else f"{text[:10]}…"
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case bool():
            return str(value).lower()
        case str() if len(value) > 22:
            return f"{value[:20]}…"
        case _:
            return str(value)


def _task(config: dict[str, Any], read: PayloadInput) -> TaskPayload:
    output = PayloadOutput(0, "ranges", UUID(int=0), UUID(int=0), "none", 0)
    return TaskPayload(
        task_id=UUID(int=0),
        attempt=1,
        epoch=1,
        job=JobRef("example", "job"),
        operator="",
        config=config,
        inputs=[read],
        outputs=[output],
        runtime="dispatcher",
        timeout_seconds=60,
        heartbeat_timeout_seconds=60,
        update_strategy="replace",
        unique_key=[],
        secrets=[],
    )


SQL_RESULT = ExampleRows(
    ("block_number", "token", "transfers", "volume"),
    [
        ("2", "0x21807cee…", "1", "867366.0"),
        ("2", "0xd5899d87…", "1", "4.3349064522288373e+23"),
        ("3", "0x177e31f6…", "2", "2.263091869626433e+25"),
    ],
    0,
)
