"""``python -m bench.control``: starts the real processes and prints one JSON line per workload."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import uvloop

from bench.control import growth, runtimes, start_and_memory, workloads
from bench.control.reference import commits_per_second, others_busy
from bench.control.stack import Stack, running
from bench.control.targets import TARGETS

Workload = Callable[[Stack], Awaitable[dict[str, Any]]]


def _throughput(quick: bool) -> dict[str, Workload]:
    """The workloads that are judged against the reference line."""
    part = 5 if quick else 1
    return {
        "W1": lambda stack: workloads.sequential_chains(stack, 50 // part),
        "W2": lambda stack: workloads.chains_at_once(stack, 1000 // part),
        "W2-triggers": lambda stack: workloads.triggered_chains(stack, 1000 // part),
        "W3": lambda stack: workloads.independent_tasks(stack, 2000 // part),
    }


async def run(only: list[str], quick: bool, folder: Path) -> None:
    seconds = 1.0 if quick else 3.0
    say({"workload": "machine", "cores": os.cpu_count(), "python": platform.python_version(), "quick": quick})
    for name, workload in _throughput(quick).items():
        if name.partition("-")[0] not in only:
            continue
        async with running(folder / name) as stack:
            busy = [await others_busy()]
            commits = [await commits_per_second(stack.state_dsn, seconds)]
            result = await workload(stack)
            commits.append(await commits_per_second(stack.state_dsn, seconds))
            busy.append(await others_busy())
        around = {"commits_per_second": [round(rate) for rate in commits], "others_busy": busy}
        say({"workload": name, **around, **result})
        target = TARGETS[name.partition("-")[0]]
        say({"workload": name, **target.judge(result[target.metric], sum(commits) / 2, max(busy))})
    if "W4" in only:
        say({"workload": "W4", **await start_and_memory.measure(folder / "W4")})
    if "W5" in only:
        sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000)
        async for line in growth.measure(folder / "W5", sizes, calls=100 if quick else 300):
            say({"workload": "W5", **line})
    await _runtimes(only, quick, folder)


async def _runtimes(only: list[str], quick: bool, folder: Path) -> None:
    part = 5 if quick else 1
    if "R1" in only:
        async with running(folder / "R1") as stack:
            async for line in runtimes.start_latency(stack, 30 // part):
                say({"workload": "R1", **line})
    if "R2" in only:
        async with running(folder / "R2") as stack:
            async for line in runtimes.no_ops(stack, 1000 // part):
                say({"workload": "R2", **line})
    if "R3" in only:
        async with running(folder / "R3") as stack:
            say({"workload": "R3", **await runtimes.spark_task(stack, 50 // part)})


def say(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.control", description=__doc__)
    parser.add_argument("--only", default="W1,W2,W3,W4,W5,R1,R2,R3", help="workloads, by comma")
    parser.add_argument(
        "--quick", action="store_true", help="a fifth of the work; for trying, not for quoting"
    )
    parser.add_argument("--home", type=Path, help="keep the homes here (otherwise a temporary folder)")
    options = parser.parse_args()
    only = options.only.split(",")
    if options.home is not None:
        uvloop.run(run(only, options.quick, options.home))
        return
    with tempfile.TemporaryDirectory(prefix="tracelake-bench-") as folder:
        uvloop.run(run(only, options.quick, Path(folder)))


if __name__ == "__main__":
    main()
