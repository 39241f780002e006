"""W5: does routing one event or claiming one task get dearer while finished work piles up?

Finished tasks, with their attempts, events and partitions, are put into the measured job itself by SQL, so
that every index that a hot query walks is as deep as in an installation that old. The Dispatcher is started
anew for each size; the cost is that of a call alone on the machine, over HTTP, and the CPU that it took.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg

from bench.control.dags import Source, dag, hold_source
from bench.control.reference import others_busy
from bench.control.stack import Stack, running
from bench.control.targets import FLAT_WITHIN, QUIET, UNCLEAR
from tracelake.postgres import sqlfiles

SQL = sqlfiles.load("bench.control", "growth.sql")
NAME = "w5"
FIRST_SEEDED = 1_000_000_000
"""Seeded scopes lie beyond all that is measured."""
IDLE = 0.1
"""CPU seconds per second that the processes under test stay below while nobody calls them."""


async def measure(folder: Path, sizes: tuple[int, ...], calls: int) -> AsyncIterator[dict[str, Any]]:
    async with running(folder) as stack:
        user = await stack.user()
        await user.post("/v1/dags", dag(NAME, "always_on", 1))
        source = await hold_source(user, await stack.worker(), NAME)
    lines: list[dict[str, Any]] = []
    seeded = 0
    for number, size in enumerate(sizes):
        async with running(folder) as stack:
            await _seed(stack.state_dsn, seeded, size)
        seeded = size
        async with running(folder) as stack:
            background = await _until_quiet(stack)
            busy = await others_busy()
            source = Source(await stack.worker(), source.fence, source.output)
            line = {
                "finished_tasks": size,
                **await _costs(stack, source, number * 10_000, calls),
                "first_pass_s": round(background, 1),
                "others_busy": busy,
            }
        lines.append(line)
        yield line
    yield _verdict(lines)


async def _seed(dsn: str, before: int, size: int) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        job = await connection.fetchrow(SQL.job, NAME)
        assert job is not None
        first, last = FIRST_SEEDED + before, FIRST_SEEDED + size - 1
        for statement in (SQL.tasks, SQL.attempts, SQL.events, SQL.inputs, SQL.outputs):
            await connection.execute(statement, job["job_id"], first, last, timeout=600)
        await connection.execute(SQL.vacuum, timeout=600)
        await connection.execute(SQL.checkpoint, timeout=600)
    finally:
        await connection.close()


async def _until_quiet(stack: Stack) -> float:
    """The loops' first pass goes over everything there is. It costs nobody's call, so it is timed apart."""
    began = time.monotonic()
    while True:
        before = stack.usage()
        await asyncio.sleep(1)
        spent = stack.usage().since(before)
        if spent.dispatcher + spent.postgres < IDLE:
            return time.monotonic() - began - 1


async def _costs(stack: Stack, source: Source, first: int, calls: int) -> dict[str, Any]:
    """One event, then one claim of the task it made, again and again."""
    connection = await asyncpg.connect(stack.state_dsn)
    events, claims = [], []
    warm_up = 30
    usage = stack.usage()
    for call in range(-warm_up, calls):
        if call == 0:
            usage = stack.usage()
        start = first + warm_up + call
        began = time.perf_counter()
        await source.announce(range(start, start + 1))
        events.append(time.perf_counter() - began)
        task_id = await connection.fetchval(SQL.queued_task, NAME, start)
        began = time.perf_counter()
        claim = await source.http.post(
            "/internal/task-claim", {"task_id": str(task_id), "worker_id": "bench"}
        )
        claims.append(time.perf_counter() - began)
        if claim["status"] != "Claimed":
            raise RuntimeError(f"not claimed: {claim['reason']}")
    spent = stack.usage().since(usage)
    await connection.close()
    return {
        "route_ms": round(statistics.median(events[warm_up:]) * 1000, 3),
        "claim_ms": round(statistics.median(claims[warm_up:]) * 1000, 3),
        "cpu_ms_per_pair": {
            "dispatcher": round(spent.dispatcher / calls * 1000, 3),
            "postgres": round(spent.postgres / calls * 1000, 3),
        },
    }


def _verdict(lines: list[dict[str, Any]]) -> dict[str, Any]:
    noisy = max(line["others_busy"] for line in lines) > QUIET
    growth = {key: round(lines[-1][key] / lines[0][key], 2) for key in ("route_ms", "claim_ms")}
    return {
        "growth": growth,
        "target": FLAT_WITHIN,
        "verdict": UNCLEAR if noisy else "reached" if max(growth.values()) <= FLAT_WITHIN else "missed",
    }
