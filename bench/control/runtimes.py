"""R1, R2 and R3: what it costs to start an operator, to run nothing at all, and to run next to nothing on Spark."""

from __future__ import annotations

import io
import statistics
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg

from bench.control.connection import Connection
from bench.control.dags import hold_source, one_job
from bench.control.fleet import Fleet, working
from bench.control.stack import Stack
from tracelake.postgres import sqlfiles

SQL = sqlfiles.load("bench.control", "runtimes.sql")
OPERATORS = Path(__file__).with_name("operators.py")
RUNTIMES = ("ecs_python", "ecs_spark", "lambda")
WARM_UP = 20
_FUNCTION = b"import time\n\ndef handler(event, context):\n    print(time.time())\n"


async def start_latency(stack: Stack, runs: int) -> AsyncIterator[dict[str, Any]]:
    """R1: from the claim to the operator's first line; cold means nothing of its kind has run in this worker."""
    user = await stack.user()
    for runtime in RUNTIMES:
        name = f"r1_{runtime}"
        job = {"udf": await _function(user)} if runtime == "lambda" else {"operator": "bench_first_line"}
        await user.post("/v1/dags", one_job(name, "manual", runtime, **job))
        began = time.time()
        async with working(stack, processes=1, runtime=runtime, concurrency=1, operators=OPERATORS) as fleet:
            ready = time.time() - began
            for run in range(runs + 1):
                await user.post(f"/v1/sources/{name}/step0/trigger", {"start": run, "end": run})
                await fleet.until(f"{name}/step1", 1)
            memory = fleet.memory_mib()
        first, *later = await _latencies(stack, name)
        yield {
            "runtime": runtime,
            "worker_ready_s": round(ready, 2),
            "cold_ms": round(first * 1000, 1),
            "warm_median_ms": round(statistics.median(later) * 1000, 1),
            "warm_p95_ms": round(statistics.quantiles(later, n=20)[18] * 1000, 1),
            "worker_memory_mib": memory,
        }
    user.close()


async def no_ops(stack: Stack, tasks: int) -> AsyncIterator[dict[str, Any]]:
    """R2: no-op tasks per second with two workers, all scopes announced at once."""
    user, worker = await stack.user(), await stack.worker()
    for runtime in RUNTIMES:
        name = f"r2_{runtime}"
        await user.post("/v1/dags", one_job(name, "always_on", runtime, operator="noop"))
        source = await hold_source(user, worker, name)
        async with working(stack, processes=2, runtime=runtime) as fleet:
            await source.announce(range(WARM_UP))
            await fleet.until(f"{name}/step1", WARM_UP)
            began = time.time()
            await source.announce(range(WARM_UP, WARM_UP + tasks))
            done = await fleet.until(f"{name}/step1", tasks)
        seconds = max(entry.at for entry in done) - began
        yield {
            "runtime": runtime,
            "tasks": tasks,
            "seconds": round(seconds, 3),
            "tasks_per_second": round(tasks / seconds, 1),
        }
    user.close()
    worker.close()


async def spark_task(stack: Stack, runs: int) -> dict[str, Any]:
    """R3: a warm task of one query, from its trigger to its answered completion, against the bare query."""
    user = await stack.user()
    await user.post("/v1/dags", one_job("r3", "manual", "ecs_spark", operator="bench_select_1"))
    await user.post("/v1/dags", one_job("r3_plain", "manual", "ecs_spark", operator="bench_plain_session"))
    async with working(stack, processes=1, runtime="ecs_spark", operators=OPERATORS) as fleet:
        for run in range(WARM_UP):
            await _end_to_end(user, fleet, "r3", run)
        times = [await _end_to_end(user, fleet, "r3", WARM_UP + run) for run in range(runs)]
        await _end_to_end(user, fleet, "r3_plain", 0)
    [plain] = [float(text) for _, text in await _first_lines(stack, "r3_plain")]
    median = statistics.median(times)
    user.close()
    return {
        "runs": runs,
        "task_median_ms": round(median * 1000, 1),
        "task_p95_ms": round(statistics.quantiles(times, n=20)[18] * 1000, 1),
        "plain_session_ms": round(plain * 1000, 1),
        "overhead_ms": round((median - plain) * 1000, 1),
    }


async def _end_to_end(user: Connection, fleet: Fleet, name: str, block: int) -> float:
    began = time.time()
    await user.post(f"/v1/sources/{name}/step0/trigger", {"start": block, "end": block})
    [done] = await fleet.until(f"{name}/step1", 1)
    return done.at - began


async def _function(user: Connection) -> dict[str, str]:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("first_line.py", _FUNCTION)
    pushed = await user.post("/v1/bundles", archive.getvalue())
    return {"bundle": pushed["bundle"], "entrypoint": "first_line.handler"}


async def _latencies(stack: Stack, dag: str) -> list[float]:
    return [float(text) - claimed for claimed, text in await _first_lines(stack, dag)]


async def _first_lines(stack: Stack, dag: str) -> list[tuple[float, str]]:
    """When each task of the job was claimed and the first line that it printed, in order."""
    state = await asyncpg.connect(stack.state_dsn)
    try:
        rows = await state.fetch(SQL.claims, dag)
    finally:
        await state.close()
    logs = stack.home.logs / "tasks"
    paths = [(row["claimed"], logs / str(row["task_id"]) / f"{row['attempt']}.log") for row in rows]
    return [(claimed, _first_line(path)) for claimed, path in paths]


def _first_line(path: Path) -> str:
    """Logs may begin with the worker's own lines; what the operator printed is a number."""
    lines = path.read_text().splitlines()
    return next(line for line in lines if line.replace(".", "", 1).isdigit())
