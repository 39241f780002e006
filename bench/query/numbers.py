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

from tracelake.evm.digit_columns import named_digit_columns
from tracelake.query.engine.attach import ReceivedRelation, attach
from tracelake.query.engine.digit_sums import with_digit_sums
from tracelake.query.engine.lockdown import without_rewriter
from tracelake.tables.parquet import MAX_ROWS, PLAIN

RUNS = 3
PIECE = 500_000
BASE = "sum of BIGINT"
QUERIES = {
    BASE: "SELECT sum(gas_used) FROM transfers",
    "sum(value)": "SELECT sum(value) FROM transfers",
    "sum(value) by 1,000 groups": "SELECT gas_used % 1000 AS g, sum(value) FROM transfers GROUP BY g",
    "sum of BIGINT by 1,000 groups": "SELECT gas_used % 1000 AS g, sum(gas_used) FROM transfers GROUP BY g",
    "sum(value_f64), approximate": "SELECT sum(value_f64) FROM transfers",
    "value > n": "SELECT count(*) FROM transfers WHERE value > 1000000000000000000000",
    "max(value)": "SELECT max(value) FROM transfers",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--rows", type=int, default=10_000_000, help="how many (10000000)")
    parser.add_argument("--without-digits", action="store_true", help="as earlier versions wrote the files")
    given = parser.parse_args()
    rows = given.rows
    with tempfile.TemporaryDirectory(prefix="tracelake-numbers-") as folder:
        path = Path(folder) / "transfers.parquet"
        write(path, rows, digits=not given.without_digits)
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


def write(path: Path, rows: int, *, digits: bool) -> None:
    draw = np.random.default_rng(7)
    writer = None
    for start in range(0, rows, PIECE):
        table = piece(draw, min(PIECE, rows - start), digits=digits)
        writer = writer or pq.ParquetWriter(path, table.schema, **PLAIN.writer_options(table.schema, table))
        writer.write_table(table, row_group_size=MAX_ROWS)
    assert writer is not None
    writer.close()


def piece(draw: np.random.Generator, rows: int, *, digits: bool) -> pa.Table:
    """Amounts of up to 84 bits: more than a BIGINT holds, as most balances of tokens are."""
    low = draw.integers(0, 2**63, rows, dtype=np.int64)
    high = draw.integers(0, 2**21, rows, dtype=np.int64)
    words = np.zeros((rows, 32), np.uint8)
    words[:, 24:] = low.astype(">i8").view(np.uint8).reshape(rows, 8)
    words[:, 16:24] = high.astype(">i8").view(np.uint8).reshape(rows, 8)
    offsets = pa.py_buffer(np.arange(0, 32 * (rows + 1), 32, dtype=np.int32))
    whole = np.stack([low.view(np.uint64), high.view(np.uint64)], axis=1)
    decimals = pa.Array.from_buffers(pa.decimal128(38, 0), rows, [None, pa.py_buffer(whole.tobytes())])
    texts = pc.cast(decimals, pa.string())
    return pa.table(
        {
            "gas_used": low >> 20,
            "value_binary": pa.Array.from_buffers(
                pa.binary(), rows, [None, offsets, pa.py_buffer(words.tobytes())]
            ),
            "value_string": texts,
            "value_f64": high * 2.0**64 + low,
            **(named_digit_columns("value", texts) if digits else {}),
        }
    )


def measured(path: Path) -> dict[str, float]:
    descriptor = os.open(path, os.O_RDONLY)
    best = dict.fromkeys(QUERIES, float("inf"))
    try:
        with duckdb.connect(config={"threads": "1"}) as connection:
            without_rewriter(connection)
            schema = pq.read_schema(path)
            views = attach(connection, [ReceivedRelation("transfers", schema, [descriptor], [])])
            for _ in range(RUNS):
                for name, query in QUERIES.items():
                    began = time.process_time()
                    connection.sql(with_digit_sums(connection, query, (), views)).fetchall()
                    best[name] = min(best[name], time.process_time() - began)
    finally:
        os.close(descriptor)
    return best


if __name__ == "__main__":
    sys.exit(main())
