"""``python -m bench.compact``: hot rows to Parquet, by ``parquet_compact`` and by a plain COPY, in one run.

One embedded Postgres with the blocks, transactions and logs of a dev chain; a warm local Spark. Beside ours, which
checks, converts, sorts and commits nothing that isn't whole, two limits, each of one process: what Postgres needs
to write the same rows out (``copy_only``), and that with the text parsed by pyarrow and written as it is, bytes as
text and nothing checked (``copy_pyarrow``). Wall time until the files are there.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import psycopg
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from psycopg import sql

from tests.support.hot_scene import USUAL, HotChain
from tests.support.operator_process import a_task, an_input, an_output
from tests.support.spark import SharedSpark
from tracelake import objects
from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.embedded.postgres import Cluster
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.schemas import TABLES
from tracelake.operators import Context
from tracelake.operators.parquet_compact import parquet_compact
from tracelake.worker.spark import session as spark_session

CHAINS = {
    "usual": {"blocks": 2999, "transactions_per_block": 20, "logs_per_transaction": 3},
    "dense": {"blocks": 299, "transactions_per_block": 20, "logs_per_transaction": 50},
}
_STORED_AT_ONCE = 250


class SparkOnly:
    """A link of an operator that has Spark and no worker."""

    canceled = paused = False

    def __init__(self, session: Any) -> None:
        self._session = session

    def call(self, action: Any) -> Any:
        raise AssertionError(action)

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> Any:
        return self._session


@dataclass
class Bench:
    link: SparkOnly
    hot: HotChain
    last: int

    def ours(self, folder: Path) -> int:
        """Run ``parquet_compact``; returns the number of rows written."""
        staging = objects.open(objects.address(folder)).staging_prefix(uuid4(), uuid4(), uuid4(), 1, 1)
        hot = [
            PayloadInput(index, uuid4(), version, 0, None, "postgres", trigger=False, start=0, end=self.last)
            for index, version in enumerate(self.hot.versions.values(), 1)
        ]
        outputs = [
            an_output(index, name=name, storage="parquet", staging=staging.child(name).uri)
            for index, name in enumerate(USUAL)
        ]
        inputs = [an_input(0, start=0, end=self.last), *hot]
        task = a_task("parquet_compact", inputs=inputs, outputs=outputs)
        ctx = Context(task, self.link, data_ticket_dsn=self.hot.dsn)
        try:
            parquet_compact(ctx)
            return sum(output.row_count or 0 for output in ctx.finish()[0])
        finally:
            ctx.close()

    def copy_pyarrow(self, folder: Path) -> int:
        rows = 0
        for name, content in self._copied():
            table = pacsv.read_csv(content, read_options=pacsv.ReadOptions(column_names=name[1]))
            pq.write_table(table, folder / f"{name[0]}.parquet", compression="zstd")
            rows += table.num_rows
        return rows

    def copy_only(self, _: Path) -> int:
        for _content in self._copied():
            continue
        return self.rows()

    def rows(self) -> int:
        with psycopg.connect(self.hot.dsn) as connection:
            counts = [
                connection.execute(
                    sql.SQL("SELECT count(*) FROM {}").format(self.hot.table(dataset))
                ).fetchone()
                for dataset in USUAL
            ]
        return sum(count[0] for count in counts if count is not None)

    def _copied(self) -> Iterator[tuple[tuple[str, list[str]], io.BytesIO]]:
        with psycopg.connect(self.hot.dsn) as connection:
            for dataset in USUAL:
                order = sql.SQL(", ").join(map(sql.Identifier, TABLES[dataset].sort_by))
                statement = sql.SQL("COPY (SELECT * FROM {} ORDER BY {}) TO STDOUT (FORMAT csv)").format(
                    self.hot.table(dataset), order
                )
                content = io.BytesIO()
                with connection.cursor().copy(statement) as copy:
                    for piece in copy:
                        content.write(piece)
                content.seek(0)
                yield (str(dataset), list(TABLES[dataset].postgres_types)), content


@contextmanager
def stored(profile: dict[str, int], session: Any) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory(prefix="tracelake-compact-postgres-") as folder,
        Cluster(Path(folder), name="bench") as cluster,
    ):
        cluster.ensure_database("data")
        hot = HotChain(cluster.dsn("data"))
        chain = DevChain(seed=1, steady=True, **profile)
        for start in range(0, chain.head + 1, _STORED_AT_ONCE):
            hot.store(chain, start, min(start + _STORED_AT_ONCE - 1, chain.head))
        for dataset in USUAL:
            hot.execute(dataset, "VACUUM ANALYZE {}")
        yield Bench(SparkOnly(session), hot, chain.head)
        hot.close()


def measured(work: Callable[[Path], int]) -> tuple[float, int]:
    with tempfile.TemporaryDirectory(prefix="tracelake-compact-") as folder:
        began = time.monotonic()
        rows = work(Path(folder))
        return time.monotonic() - began, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--chain", choices=[*CHAINS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts (5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tracelake-compact-") as folder:
        spark = SharedSpark(Path(folder))
        try:
            attempt = spark_session.begin(spark_session.open_session(spark.target), str(uuid4()), 1, 1)
            for name in CHAINS if options.chain == "all" else [options.chain]:
                with stored(CHAINS[name], attempt.session) as bench:
                    compare(name, bench, options.rounds)
            attempt.end()
        finally:
            spark.close()
    return 0


def compare(name: str, bench: Bench, rounds: int) -> None:
    writers = {"copy_only": bench.copy_only, "copy_pyarrow": bench.copy_pyarrow, "ours": bench.ours}
    measured(bench.ours)
    seconds: dict[str, list[float]] = {writer: [] for writer in writers}
    rows = 0
    for _ in range(rounds):
        for writer, write in writers.items():
            took, rows = measured(write)
            seconds[writer].append(round(took, 3))
    best = {writer: min(times) for writer, times in seconds.items()}
    for writer, times in seconds.items():
        line = {"chain": name, "writer": writer, "rows": rows, "seconds": times}
        line |= {"rows_per_second": round(rows / best[writer])}
        line |= {
            f"times_{other}": round(best[other] / best[writer], 2) for other in writers if other != writer
        }
        sys.stdout.write(orjson.dumps(line).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
