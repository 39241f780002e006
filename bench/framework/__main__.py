"""``python -m bench.framework`` serves the claim endpoint by each candidate and prints what it reaches.

Every round measures all candidates once, each round beginning with another, so that drift of the machine
falls on all alike; the table shows medians over the rounds, and the range of the CPU time. The server's CPU
time per request is what to compare by: throughput and latency also measure other users of the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from bench.framework import load, postgres

CONNECTIONS = 16


@dataclass(frozen=True)
class Candidate:
    framework: str
    server: str

    def command(self, port: int) -> list[str]:
        app = f"bench.framework.app_{self.framework}:app"
        if self.server == "granian":
            serve = ["granian", "--interface", "asgi", "--loop", "uvloop", "--log-level", "warning"]
        else:
            serve = ["uvicorn", "--loop", "uvloop", "--http", "httptools", "--no-access-log"]
            serve += ["--log-level", "warning"]
        return [sys.executable, "-m", *serve, "--host", "127.0.0.1", "--port", str(port), app]


CANDIDATES = (
    Candidate("starlette", "uvicorn"),
    Candidate("litestar", "uvicorn"),
    Candidate("litestar_bytes", "uvicorn"),
    Candidate("fastapi", "uvicorn"),
    Candidate("fastapi_bytes", "uvicorn"),
    Candidate("litestar", "granian"),
)


async def check_answers(port: int) -> int:
    """Each candidate does the same work: it refuses a bad token and a bad uuid. Gives the reply's size."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    good, size = await load.exchange(reader, writer, load.request())
    unknown, _ = await load.exchange(reader, writer, load.request(token="wrong"))
    malformed, _ = await load.exchange(reader, writer, load.request(task_id="not-a-uuid"))
    writer.close()
    if good != 200 or unknown != 401 or malformed not in (400, 422):
        raise RuntimeError(f"unexpected answers: {good}, {unknown}, {malformed}")
    return size


def wait_until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            asyncio.run(check_answers(port))
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server ended with {process.returncode}")


@contextlib.contextmanager
def serving(candidate: Candidate, dsn: str | None) -> Iterator[tuple[int, int]]:
    port = postgres.free_port()
    environment = {**os.environ, **({"FRAMEWORK_BENCH_DSN": dsn} if dsn else {})}
    process = subprocess.Popen(candidate.command(port), env=environment)
    try:
        wait_until_listening(process, port)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """Of the server and its workers, which are children under granian."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


def measure(candidate: Candidate, dsn: str | None, seconds: float) -> dict[str, float]:
    with serving(candidate, dsn) as (port, pid):
        outcome: dict[str, float] = {}
        for duration in (1.0, seconds):
            before = cpu_seconds(pid)
            arguments = [str(port), str(duration), str(CONNECTIONS)]
            generator = [sys.executable, "-m", "bench.framework.load", *arguments]
            outcome = json.loads(subprocess.run(generator, check=True, capture_output=True).stdout)
            outcome["cpu_us"] = (cpu_seconds(pid) - before) / outcome["requests"] * 1e6
        return {**outcome, "bytes": asyncio.run(check_answers(port))}


def table(variant: str, results: dict[Candidate, list[dict[str, float]]]) -> None:
    medians = {
        candidate: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for candidate, runs in results.items()
    }
    limit = medians[CANDIDATES[0]]["cpu_us"]
    print(f"\n{variant}")
    print(
        "| framework | server | CPU µs/request (range) | ratio | requests/s | p50 ms | p99 ms | reply bytes |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for candidate, row in medians.items():
        costs = [run["cpu_us"] for run in results[candidate]]
        print(
            f"| {candidate.framework} | {candidate.server} "
            f"| {row['cpu_us']:.0f} ({min(costs):.0f}-{max(costs):.0f}) "
            f"| {row['cpu_us'] / limit:.2f} | {row['requests_per_second']:,.0f} "
            f"| {row['p50_ms']:.2f} | {row['p99_ms']:.2f} | {row['bytes']:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.framework", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with postgres.running() as dsn:
        for variant, target in (("handler only", None), ("with one SELECT", dsn)):
            results: dict[Candidate, list[dict[str, float]]] = {candidate: [] for candidate in CANDIDATES}
            for turn in range(options.rounds):
                first = turn % len(CANDIDATES)
                for candidate in CANDIDATES[first:] + CANDIDATES[:first]:
                    results[candidate].append(measure(candidate, target, options.seconds))
            table(variant, results)


if __name__ == "__main__":
    main()
