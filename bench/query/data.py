"""Logs and blocks of a made-up chain, in the project's own schemas and files.

A hundred logs in every block: few contracts send most of them, accounts come again and again, amounts are small. So
the files have the sizes and the filters that files of a real chain have. Made once and kept in ``.tools``.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.random import Generator, default_rng

from tracelake.contracts.manifest import ManifestFile
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.objects.base import ObjectLocation
from tracelake.operators.cells import chain_layout
from tracelake.tables.parquet import ParquetFile

FOLDER = Path(__file__).parents[2] / ".tools" / "query-logs"
LOGS_PER_BLOCK = 100
LOGS_PER_TRANSACTION = 3
BLOCKS_PER_FILE = 10_000
CONTRACTS, EVENTS, ACCOUNTS = 2_000, 50, 200_000
FIRST_SECOND = 1_700_000_000


def made(logs: int) -> dict[ChainTable, list[ManifestFile]]:
    """The files of both tables for a number of logs; existing files are used again."""
    files = max(1, logs // (LOGS_PER_BLOCK * BLOCKS_PER_FILE))
    folder = FOLDER / str(files)
    index = folder / "files.json"
    if not index.exists():
        shutil.rmtree(folder, ignore_errors=True)
        # Not forked: Arrow's threads don't survive it.
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            logs_files = list(pool.map(_make_logs, [folder] * files, range(files)))
            blocks_files = list(pool.map(_make_blocks, [folder] * files, range(files)))
        index.write_bytes(msgspec.json.encode({"logs": logs_files, "blocks": blocks_files}))
    return msgspec.json.decode(index.read_bytes(), type=dict[ChainTable, list[ManifestFile]])


def contract(number: int) -> bytes:
    return _pool(1, CONTRACTS, 20)[number].as_py()


def _make_logs(folder: Path, cell: int) -> ManifestFile:
    rng = default_rng([cell, 1])
    blocks = np.arange(BLOCKS_PER_FILE) + cell * BLOCKS_PER_FILE
    rows = len(blocks) * LOGS_PER_BLOCK
    block = np.repeat(np.arange(len(blocks)), LOGS_PER_BLOCK)
    log_index = np.tile(np.arange(LOGS_PER_BLOCK), len(blocks))
    transaction = log_index // LOGS_PER_TRANSACTION
    per_block = LOGS_PER_BLOCK // LOGS_PER_TRANSACTION + 1
    columns = {
        "chain_id": pa.array(np.ones(rows, np.int64)),
        "block_number": pa.array(blocks[block]),
        "block_hash": _random(rng, len(blocks), 32).take(pa.array(block)),
        "timestamp": _times(blocks[block]),
        "transaction_index": pa.array(transaction),
        "log_index": pa.array(log_index),
        "transaction_hash": _random(rng, len(blocks) * per_block, 32).take(
            pa.array(block * per_block + transaction)
        ),
        "address": _pool(1, CONTRACTS, 20).take(pa.array(_often(rng, CONTRACTS, rows))),
        "topic0": _pool(2, EVENTS, 32).take(pa.array(_often(rng, EVENTS, rows))),
        "topic1": _pool(3, ACCOUNTS, 20, padding=12).take(pa.array(_often(rng, ACCOUNTS, rows))),
        "topic2": _pool(3, ACCOUNTS, 20, padding=12).take(pa.array(_often(rng, ACCOUNTS, rows))),
        "topic3": pa.nulls(rows, pa.binary()),
        "data": _amounts(rng, rows),
    }
    return _write(folder, ChainTable.LOGS, cell, columns)


def _make_blocks(folder: Path, cell: int) -> ManifestFile:
    rng = default_rng([cell, 2])
    blocks = np.arange(BLOCKS_PER_FILE) + cell * BLOCKS_PER_FILE
    rows = len(blocks)
    columns = {
        "chain_id": pa.array(np.ones(rows, np.int64)),
        "block_number": pa.array(blocks),
        "block_hash": _random(rng, rows, 32),
        "timestamp": _times(blocks),
        "parent_hash": _random(rng, rows, 32),
        "author": _pool(4, 20, 20).take(pa.array(_often(rng, 20, rows))),
        "gas_limit": pa.array(np.full(rows, 30_000_000)),
        "gas_used": pa.array(rng.integers(1_000_000, 30_000_000, rows)),
        "transaction_count": pa.array(np.full(rows, LOGS_PER_BLOCK // LOGS_PER_TRANSACTION + 1)),
        "logs_bloom": _random(rng, rows, 256),
        "state_root": _random(rng, rows, 32),
    }
    return _write(folder, ChainTable.BLOCKS, cell, columns)


def _write(folder: Path, dataset: ChainTable, cell: int, columns: dict[str, pa.Array]) -> ManifestFile:
    schema = TABLES[dataset].arrow
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else pa.nulls(len(columns["chain_id"]), field.type)
        for field in schema
    ]
    start = cell * BLOCKS_PER_FILE
    name = f"{dataset}_{start}_{start + BLOCKS_PER_FILE - 1}.parquet"
    place = ObjectLocation.parse(f"file://{folder / str(dataset) / name}")
    file = ParquetFile(place, schema, "block_number", chain_layout(dataset, chain_id=1))
    file.add(pa.Table.from_arrays(arrays, schema=schema))
    return file.close()


def _times(blocks: np.ndarray) -> pa.Array:
    return pa.array((FIRST_SECOND + blocks * 2) * 1_000_000).cast(pa.timestamp("us", "UTC"))


def _random(rng: Generator, count: int, width: int) -> pa.Array:
    return _binary(rng.bytes(count * width), count, width)


def _pool(seed: int, count: int, width: int, padding: int = 0) -> pa.Array:
    """The same values for every file."""
    values = np.frombuffer(default_rng(seed).bytes(count * width), np.uint8).reshape(count, width)
    padded = np.concatenate([np.zeros((count, padding), np.uint8), values], axis=1)
    return _binary(padded.tobytes(), count, width + padding)


def _amounts(rng: Generator, count: int) -> pa.Array:
    values = np.zeros((count, 4), ">u8")
    values[:, 3] = rng.integers(1, 10**6, count) * 10**12
    return _binary(values.tobytes(), count, 32)


def _binary(content: bytes, count: int, width: int) -> pa.Array:
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), count, [None, pa.py_buffer(content)])
    return fixed.cast(pa.binary())


def _often(rng: Generator, count: int, rows: int) -> np.ndarray:
    """Numbers below ``count``, the small ones far more often."""
    return np.minimum((count * rng.random(rows) ** 3).astype(np.int64), count - 1)
