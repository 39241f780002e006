"""``python -m bench.query``: what the Query Service adds to a query, beside plain DuckDB on the same files.

10 M logs and their blocks, in files as operators write them, committed as a task's outputs. Ours is
``tracelake query-service`` as people run it, asked over its port by a client that keeps its connection: token,
catalog, gate, sandboxed slot, audit row and JSON included. Plain DuckDB runs in the benchmark's own process, warm,
with as many threads, and gives Python values. Both take turns and get the same parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import structlog

from bench.control.reference import others_busy
from bench.control.targets import QUIET
from bench.query.data import made
from bench.query.service import Running, running
from bench.query.workloads import POINT, WARM_RUNS, WORKLOADS, Plain, Service, Workload, at_once, taking_turns
from tracelake.evm.raw_block import ChainTable

TARGETS: dict[str, tuple[str, float]] = {
    "point lookup": ("added_ms", 10.0),
    "range aggregate": ("added_percent", 15.0),
}
CLIENTS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--logs", type=int, default=10_000_000, help="how many (10000000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the clients that ask at once (10)")
    parser.add_argument("--slots", type=int, default=2)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    threads = len(os.sched_getaffinity(0))
    files = made(options.logs)
    last = max(file.max_block or 0 for file in files[ChainTable.LOGS])
    with (
        tempfile.TemporaryDirectory(prefix="tracelake-query-") as folder,
        running(Path(folder), files, slots=options.slots, threads=threads) as service,
    ):
        plain = Plain(service.files, threads)
        for workload in WORKLOADS:
            say(one_by_one(workload, service, plain, last))
        say(together(service, plain, last, options.seconds))
    return 0


def one_by_one(workload: Workload, service: Running, plain: Plain, last: int) -> dict[str, Any]:
    busy = asyncio.run(others_busy())
    cpu = {"duckdb": time.process_time, "service": service.cpu_seconds}
    before = {way: used() for way, used in cpu.items()}
    seconds = taking_turns(workload, {"duckdb": plain, "service": Service(service)}, last)
    found = {"workload": workload.name, "runs": workload.runs}
    found |= {f"{way}_ms": spread(each) for way, each in seconds.items()}
    found |= {
        f"{way}_cpu_ms": round((used() - before[way]) * 1000 / (workload.runs + WARM_RUNS), 1)
        for way, used in cpu.items()
    }
    found |= {"others_busy": busy}
    ours, theirs = (statistics.median(seconds[way]) for way in ("service", "duckdb"))
    found |= {
        "added_ms": round((ours - theirs) * 1000, 2),
        "added_percent": round((ours / theirs - 1) * 100, 1),
    }
    if workload.name in TARGETS:
        measure, target = TARGETS[workload.name]
        found |= {"metric": measure, "target": target}
        verdict = "reached" if found[measure] <= target else "missed"
        found |= {"verdict": verdict if busy <= QUIET else "unclear"}
    return found


def together(service: Running, plain: Plain, last: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"workload": f"point lookup, {CLIENTS} clients at once"}
    ways = {
        "duckdb": [plain.cursor() for _ in range(CLIENTS)],
        "service": [Service(service) for _ in range(CLIENTS)],
    }
    for way, clients in ways.items():
        times = at_once(clients, POINT, last, seconds)
        found |= {f"{way}_ms": spread(times), f"{way}_per_second": round(len(times) / seconds, 1)}
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(len(ordered) * 0.99))]
    return {"p50": round(statistics.median(ordered) * 1000, 2), "p99": round(p99 * 1000, 2)}


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
