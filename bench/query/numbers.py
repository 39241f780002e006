"""``python -m bench.query.numbers``: what exact numbers cost beside a sum of BIGINT over as many rows.

One file as operators write it, with amounts as tokens of 18 decimals have them, attached and asked as a slot does
it, in this process and by one thread. Times are CPU seconds, the best of a few runs that take turns, so that a busy
machine changes the ratios little.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tracelake.query.engine.attach import ReceivedRelation, attach
from tracelake.query.engine.lockdown import without_rewriter
from tracelake.tables.parquet import MAX_ROWS

RUNS = 3
PIECE = 500_000
BASE = "sum of BIGINT"
QUERIES = {
    BASE: "SELECT sum(gas_used) FROM transfers",
    "sum(value)": "SELECT sum(value) FROM transfers",
    "sum(value_f64), approximate": "SELECT sum(value_f64) FROM transfers",
    "value > n": "SELECT count(*) FROM transfers WHERE value > 1000000000000000000000",
    "max(value)": "SELECT max(value) FROM transfers",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--rows", type=int, default=10_000_000, help="how many (10000000)")
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory(prefix="tracelake-numbers-") as folder:
        path = Path(folder) / "transfers.parquet"
        write(path, rows)
        best = measured(path)
    for name, seconds in best.items():
        line = {
            "query": name,
            "rows": rows,
            "cpu_s": round(seconds, 3),
            "ratio": round(seconds / best[BASE], 2),
        }
        sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
    return 0


def write(path: Path, rows: int) -> None:
    draw = np.random.default_rng(7)
    writer = None
    for start in range(0, rows, PIECE):
        table = piece(draw, min(PIECE, rows - start))
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=MAX_ROWS)
    assert writer is not None
    writer.close()


def piece(draw: np.random.Generator, rows: int) -> pa.Table:
    """Amounts of up to 84 bits: more than a BIGINT holds, as most balances of tokens are."""
    low = draw.integers(0, 2**63, rows, dtype=np.int64)
    high = draw.integers(0, 2**21, rows, dtype=np.int64)
    digits = np.zeros((rows, 32), np.uint8)
    digits[:, 24:] = low.astype(">i8").view(np.uint8).reshape(rows, 8)
    digits[:, 16:24] = high.astype(">i8").view(np.uint8).reshape(rows, 8)
    offsets = pa.py_buffer(np.arange(0, 32 * (rows + 1), 32, dtype=np.int32))
    whole = np.stack([low.view(np.uint64), high.view(np.uint64)], axis=1)
    decimals = pa.Array.from_buffers(pa.decimal128(38, 0), rows, [None, pa.py_buffer(whole.tobytes())])
    return pa.table(
        {
            "gas_used": low >> 20,
            "value_binary": pa.Array.from_buffers(
                pa.binary(), rows, [None, offsets, pa.py_buffer(digits.tobytes())]
            ),
            "value_string": pc.cast(decimals, pa.string()),
            "value_f64": high * 2.0**64 + low,
        }
    )


def measured(path: Path) -> dict[str, float]:
    descriptor = os.open(path, os.O_RDONLY)
    best = dict.fromkeys(QUERIES, float("inf"))
    try:
        with duckdb.connect(config={"threads": "1"}) as connection:
            without_rewriter(connection)
            schema = pq.read_schema(path)
            attach(connection, [ReceivedRelation("transfers", schema, [descriptor], [])])
            for _ in range(RUNS):
                for name, query in QUERIES.items():
                    began = time.process_time()
                    connection.sql(query).fetchall()
                    best[name] = min(best[name], time.process_time() - began)
    finally:
        os.close(descriptor)
    return best


if __name__ == "__main__":
    sys.exit(main())
