"""``python -m bench.tip``: how long after a block was mined its rows can be read in hot Postgres.

anvil mines a block with token transfers twice a second, and ``tracelake dev`` follows it; a watcher looks for the
block every few milliseconds. Beside it the limit, seen by the same watcher in the same run: rows that this process
inserts itself at the moment when it has mined.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psycopg
from psycopg import sql

from tests.support.anvil import Anvil, AnvilChain, running_anvil
from tests.support.dev_stack import DevStack
from tracelake.client import Client

INTERVAL = 0.5
TARGETS = {"p50": 1.0, "p99": 2.5}
_LOOK_SECONDS = 0.005
_PATIENCE = 60.0
DAG = b"""
name: tip
jobs:
  - name: follower
    activation: source
    runtime: ecs_spark
    operator: block_follower
    source: { kind: always_on }
    outputs: 3
    update_strategy: replace
    config: { chain_id: 31337, rpc_pool: main, start_block: 0, finality: 12 }
publish:
  blocks: { from: { job: follower, output: 0 } }
  transactions: { from: { job: follower, output: 1 } }
  logs: { from: { job: follower, output: 2 } }
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--transactions", type=int, default=20, help="per block, at most")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tracelake-tip-") as folder,
        running_anvil() as node,
        _followed(Path(folder), node) as (dsn, table),
    ):
        chain = AnvilChain(node, 1, most_transactions=options.transactions)
        times = _measure(chain, dsn, table, options.seconds)
    ours, limit = _percentiles(times.lags(times.ours)), _percentiles(times.lags(times.limit))
    _say({"workload": "tip", "blocks": len(times.mined), "seconds_to_visible": ours, "limit": limit})
    for name, target in TARGETS.items():
        verdict = "reached" if ours[name] <= target else "missed"
        ratio = round(ours[name] / limit[name], 1)
        _say(
            {
                "workload": "tip",
                "metric": name,
                "measured": ours[name],
                "target": target,
                "verdict": verdict,
                "ratio_to_limit": ratio,
            }
        )
    return 0


@dataclass
class Times:
    """By block: when it was mined, when the follower's rows were first seen, and when those of the limit were."""

    mined: dict[int, float] = field(default_factory=dict)
    ours: dict[int, float] = field(default_factory=dict)
    limit: dict[int, float] = field(default_factory=dict)

    def lags(self, seen: dict[int, float]) -> list[float]:
        return [seen[number] - at for number, at in self.mined.items()]


@contextmanager
def _followed(folder: Path, node: Anvil) -> Iterator[tuple[str, sql.Identifier]]:
    pools = folder / "rpc.toml"
    pools.write_text(f'[pools.main]\n[[pools.main.endpoints]]\nname = "anvil"\nurl = "{node.url}"\n')
    pools.chmod(0o600)
    stack = DevStack(folder / "home", folder, "--rpc-pools", str(pools), workers=True)
    try:
        handle = stack.until_ready()
        with Client(handle.user_url, handle.user_token) as client:
            client.deploy(DAG)
            version = client.dataset("blocks").dataset_version
        yield handle.data_owner_dsn, sql.Identifier("data", f"d_{version.hex}")
    finally:
        stack.close()


def _measure(chain: AnvilChain, dsn: str, table: sql.Identifier, seconds: float) -> Times:
    times = Times()
    stopping = threading.Event()
    with psycopg.connect(dsn, autocommit=True) as data:
        data.execute("CREATE TABLE limit_of_bench (block_number bigint)")
        watching = threading.Thread(target=_watch, args=(dsn, table, times, stopping))
        watching.start()
        try:
            _wait_for(times.ours, chain.grow(1))
            began = time.monotonic()
            for number in range(int(seconds / INTERVAL)):
                time.sleep(max(0.0, began + number * INTERVAL - time.monotonic()))
                head = chain.grow(1)
                times.mined[head] = time.monotonic()
                data.execute("INSERT INTO limit_of_bench VALUES (%s)", (head,))
            _wait_for(times.ours, head)
        finally:
            stopping.set()
            watching.join()
    return times


def _watch(dsn: str, table: sql.Identifier, times: Times, stopping: threading.Event) -> None:
    """All tables of a block are committed together: the blocks stand for them."""
    highest = sql.SQL("SELECT coalesce(max(block_number), -1) FROM {}")
    watched = [(table, times.ours), (sql.Identifier("limit_of_bench"), times.limit)]
    with psycopg.connect(dsn, autocommit=True) as data:
        while not stopping.wait(_LOOK_SECONDS):
            for place, seen in watched:
                try:
                    row = data.execute(highest.format(place)).fetchone()
                except psycopg.errors.UndefinedTable:
                    continue
                now = time.monotonic()
                for number in range(max(seen, default=-1) + 1, (row[0] if row else -1) + 1):
                    seen[number] = now


def _wait_for(visible: dict[int, float], number: int) -> None:
    until = time.monotonic() + _PATIENCE
    while number not in visible:
        if time.monotonic() > until:
            raise SystemExit(f"block {number} was never seen")
        time.sleep(_LOOK_SECONDS)


def _percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3), "max": round(max(values), 3)}


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
