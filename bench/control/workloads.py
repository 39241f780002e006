"""W1, W2 and W3: how long a chain of tasks takes, and how many chains and tasks per second go through."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from bench.control.connection import Connection
from bench.control.dags import dag, hold_source
from bench.control.fleet import Fleet, working
from bench.control.stack import Stack

CHAIN = 3
TRIGGERS_AT_ONCE = 16
WARM_UP_CHAINS = 5
WARM_UP = 200
"""Before the clock starts: connections open, statements prepared, as in a Dispatcher that has run a while."""


async def sequential_chains(stack: Stack, runs: int) -> dict[str, Any]:
    """W1: from a person's trigger to the answer to the last completion, one chain at a time."""
    user = await stack.user()
    await user.post("/v1/dags", dag("w1", "manual", CHAIN))
    async with working(stack, processes=1) as fleet:
        for run in range(WARM_UP_CHAINS):
            await _chain(user, fleet, runs + 1 + run)
        costs = _Costs(stack, fleet)
        times = [await _chain(user, fleet, run) for run in range(1, runs + 1)]
        spent = costs.per(runs * CHAIN)
    user.close()
    return {
        "runs": runs,
        "median_ms": round(statistics.median(times) * 1000, 2),
        "p95_ms": round(statistics.quantiles(times, n=20)[18] * 1000, 2),
        "best_ms": round(min(times) * 1000, 2),
        "cpu_ms_per_task": spent,
    }


async def _chain(user: Connection, fleet: Fleet, start: int) -> float:
    began = time.time()
    await user.post("/v1/sources/w1/step0/trigger", {"start": start, "end": start})
    done = await fleet.until(f"w1/step{CHAIN}", 1)
    return max(entry.at for entry in done) - began


async def chains_at_once(stack: Stack, chains: int) -> dict[str, Any]:
    """W2: all scopes are announced by one source task; until the last completion of the last chain."""
    seconds, spent = await _burst(stack, "w2", CHAIN, chains)
    return {
        "chains": chains,
        "seconds": round(seconds, 3),
        "chains_per_second": round(chains / seconds, 1),
        "cpu_ms_per_task": spent,
    }


async def triggered_chains(stack: Stack, chains: int) -> dict[str, Any]:
    """W2 again, every chain started by a person's call of its own."""
    user = await stack.user()
    await user.post("/v1/dags", dag("w2t", "manual", CHAIN))
    starts = iter(range(chains))

    async def trigger() -> None:
        person = await stack.user()
        for start in starts:
            await person.post("/v1/sources/w2t/step0/trigger", {"start": start, "end": start})
        person.close()

    async with working(stack, processes=2) as fleet:
        costs = _Costs(stack, fleet)
        began = time.time()
        triggers = [asyncio.create_task(trigger()) for _ in range(TRIGGERS_AT_ONCE)]
        done = await fleet.until(f"w2t/step{CHAIN}", chains)
        seconds = max(entry.at for entry in done) - began
        await asyncio.gather(*triggers)
        spent = costs.per(chains * CHAIN)
    user.close()
    return {
        "chains": chains,
        "seconds": round(seconds, 3),
        "chains_per_second": round(chains / seconds, 1),
        "cpu_ms_per_task": spent,
    }


async def independent_tasks(stack: Stack, tasks: int) -> dict[str, Any]:
    """W3: no task depends on another; from announcing their scopes to the last completion."""
    seconds, spent = await _burst(stack, "w3", 1, tasks)
    return {
        "tasks": tasks,
        "seconds": round(seconds, 3),
        "tasks_per_second": round(tasks / seconds, 1),
        "cpu_ms_per_task": spent,
    }


async def _burst(stack: Stack, name: str, length: int, scopes: int) -> tuple[float, dict[str, float]]:
    user, worker = await stack.user(), await stack.worker()
    await user.post("/v1/dags", dag(name, "always_on", length))
    source = await hold_source(user, worker, name)
    async with working(stack, processes=2) as fleet:
        await source.announce(range(WARM_UP))
        await fleet.until(f"{name}/step{length}", WARM_UP)
        costs = _Costs(stack, fleet)
        began = time.time()
        await source.announce(range(WARM_UP, WARM_UP + scopes))
        done = await fleet.until(f"{name}/step{length}", scopes)
        seconds = max(entry.at for entry in done) - began
        spent = costs.per(scopes * length)
    user.close()
    worker.close()
    return seconds, spent


class _Costs:
    """CPU per task from here on: on a machine that others use, steadier than any wall time."""

    def __init__(self, stack: Stack, fleet: Fleet) -> None:
        self._stack = stack
        self._fleet = fleet
        self._before = stack.usage()
        self._workers_before = fleet.cpu_seconds()

    def per(self, tasks: int) -> dict[str, float]:
        spent = self._stack.usage().since(self._before)
        workers = self._fleet.cpu_seconds() - self._workers_before
        return {
            name: round(seconds / tasks * 1000, 3)
            for name, seconds in (
                ("dispatcher", spent.dispatcher),
                ("postgres", spent.postgres),
                ("workers", workers),
            )
        }
