"""``python -m bench.pressure``: how soon backpressure holds and releases, and what it costs, small and large.

One JSON line per workload:

- ``reaction``: from the answer to the completion that fills a queue to the answer to the last granted claim of a
  held job; from the answer to the completion that empties it below the low mark to the first granted claim.
- ``throughput``: a chain of three no-op jobs, without thresholds, with thresholds that are never reached, and with
  one that holds and releases all the while; in turns, so that neighbours disturb all alike.
- ``graph``: a look at 1,000 jobs with a million waiting tasks, all below their thresholds, with some above, and
  with a million scopes that are kept besides.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import uvloop

from bench.control.connection import Connection
from bench.control.dags import Source, hold_source
from bench.control.fleet import Fleet, working
from bench.control.stack import SOURCE_RUNTIME, Stack, running
from tracelake.domain.pressure import PressureSettings, PressureSnapshot, decide, pressure_of
from tracelake.postgres import sqlfiles
from tracelake.store import db, pressure
from tracelake.store.db import Database, DeployLock, Transaction, open_pool

DEPTH = 10
ROUNDS = 30
SCOPES = 2_000
HOLDING_DEPTH = 800
WARM_UP = 200
_UNLIMITED = "SET statement_timeout = 0; SET transaction_timeout = 0"
"""A million tasks are made in one statement, which takes longer than a pool lets one run."""
SQL = sqlfiles.parse("graph", Path(__file__).with_name("graph.sql").read_text(encoding="utf-8"))


def chain(name: str, length: int, **last: Any) -> bytes:
    """An always-on source and no-op jobs, one behind the other; ``last`` is more of the last one."""
    source = {
        "name": "step0",
        "activation": "source",
        "runtime": SOURCE_RUNTIME,
        "operator": "noop",
        "source": {"kind": "always_on"},
        "outputs": 1,
    }
    jobs = [
        {
            "name": f"step{step}",
            "activation": "reactive",
            "runtime": "ecs_python",
            "operator": "noop",
            "inputs": [{"from": {"job": f"step{step - 1}", "output": 0}}],
            "outputs": [{"name": "done", "storage": "none"}],
            "execution_strategy": "PerPartition",
            **(last if step == length else {}),
        }
        for step in range(1, length + 1)
    ]
    return orjson.dumps(
        {"name": name, "defaults": {"heartbeat_timeout_seconds": 3600}, "jobs": [source, *jobs]}
    )


class Hand:
    """A worker by hand: claims and completes single tasks of a DAG, in the order in which they were made."""

    def __init__(self, user: Connection, worker: Connection, dag: str) -> None:
        self._user = user
        self._worker = worker
        self._dag = dag

    async def queued(self, job: str) -> list[str]:
        page = await self._user.get(f"/v1/tasks?dag={self._dag}&job={job}&status=Queued&limit=1000")
        return [task["task_id"] for task in reversed(page["tasks"])]

    async def claim(self, task_id: str) -> dict[str, Any] | None:
        answer: dict[str, Any] = await self._worker.post(
            "/internal/task-claim", {"task_id": task_id, "worker_id": "bench"}
        )
        return answer if answer["status"] == "Claimed" else None

    async def complete(self, claim: dict[str, Any]) -> None:
        fence = {key: claim[key] for key in ("task_id", "attempt", "lease_token")}
        await self._worker.post("/internal/task-complete", {**fence, "status": "Completed"})

    async def run(self, task_id: str) -> None:
        claim = await self.claim(task_id)
        assert claim is not None, task_id
        await self.complete(claim)


async def reaction(stack: Stack, rounds: int) -> dict[str, Any]:
    user, worker = await stack.user(), await stack.worker()
    await user.post("/v1/dags", chain("r", 2, max_queue_depth=DEPTH))
    source = await hold_source(user, worker, "r")
    hand = Hand(user, worker, "r")
    trips, clears, late = [], [], []
    announced = 0
    for _ in range(rounds):
        await source.announce(range(announced, announced + 400))
        announced += 400
        feed = iter(await hand.queued("step1"))
        for _ in range(DEPTH - len(await hand.queued("step2"))):
            await hand.run(next(feed))
        full = time.perf_counter()
        last, count = full, 0
        for task in feed:
            claim = await hand.claim(task)
            if claim is None:
                held = task
                break
            last, count = time.perf_counter(), count + 1
        trips.append(last - full)
        late.append(count)
        await asyncio.sleep(0.1)
        full_queue = await hand.queued("step2")
        for task in full_queue[: DEPTH // 2 + 1]:
            await hand.run(task)
        clear = time.perf_counter()
        while (claim := await hand.claim(held)) is None:
            pass
        clears.append(time.perf_counter() - clear)
        await hand.complete(claim)
        for task in await hand.queued("step2"):
            await hand.run(task)
    user.close()
    worker.close()
    return {
        "rounds": rounds,
        "trip_to_last_held_claim_ms": _spread(trips),
        "claims_after_the_trip": {"median": statistics.median(late), "most": max(late)},
        "clear_to_first_released_claim_ms": _spread(clears),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(seconds) * 1000, 1),
        "p95": round(statistics.quantiles(seconds, n=20)[18] * 1000, 1),
        "most": round(max(seconds) * 1000, 1),
    }


async def throughput(stack: Stack, scopes: int, turns: int) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "off": {},
        "on": {"max_queue_depth": 10_000_000, "max_queue_age": "1d"},
        "holding": {"max_queue_depth": max(10, scopes * HOLDING_DEPTH // SCOPES)},
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    async with working(stack, processes=2) as fleet:
        for turn in range(turns):
            for kind, settings in kinds.items():
                name = f"{kind}{turn}"
                # New ones each time: the Dispatcher closes connections that are idle for as long as a turn takes.
                user, worker = await stack.user(), await stack.worker()
                await user.post("/v1/dags", chain(name, 3, **settings))
                source = await hold_source(user, worker, name)
                await source.announce(range(WARM_UP))
                await fleet.until(f"{name}/step3", WARM_UP)
                rates[kind].append(await _rate(source, fleet, name, scopes))
                user.close()
                worker.close()
    usual = {kind: statistics.median(found) for kind, found in rates.items()}
    return {
        "scopes": scopes,
        "tasks_per_second": {kind: [round(rate, 1) for rate in found] for kind, found in rates.items()},
        "on_to_off": round(usual["on"] / usual["off"], 3),
        "holding_to_off": round(usual["holding"] / usual["off"], 3),
    }


async def _rate(source: Source, fleet: Fleet, name: str, scopes: int) -> float:
    began = time.time()
    await source.announce(range(WARM_UP, WARM_UP + scopes))
    done = await fleet.until(f"{name}/step3", scopes)
    seconds: float = max(entry.at for entry in done) - began
    return 3 * scopes / seconds


async def graph(stack: Stack, jobs: int, waiting: int) -> dict[str, Any]:
    """On the state database of a Dispatcher that is idle otherwise; the graph is made by SQL."""
    pool = await open_pool(stack.state_dsn, min_size=1, max_size=2, application="bench")
    database = Database(pool)
    for statement in (SQL.make_jobs, SQL.make_edges, SQL.make_tasks):
        async with pool.acquire() as connection:
            await connection.execute(_UNLIMITED)
            await connection.execute(statement.format(jobs=jobs, waiting=waiting), timeout=900)
    async with pool.acquire() as connection:
        await connection.execute(_UNLIMITED)
        await connection.execute("VACUUM ANALYZE task", timeout=900)
        await connection.execute("ANALYZE job; ANALYZE job_input; ANALYZE dataset_version")
    lines = {}
    for what, thresholds, kept in (
        ("calm", waiting, 0),
        ("a tenth tripped", None, 0),
        ("and kept", None, waiting),
    ):
        async with pool.acquire() as connection:
            await connection.execute(SQL.set_thresholds, thresholds)
            if kept:
                await connection.execute(_UNLIMITED)
                await connection.execute(SQL.make_kept.format(jobs=jobs, waiting=kept), timeout=900)
                await connection.execute("ANALYZE held_scope; ANALYZE event")
        times = []
        for _ in range(21):
            began = time.perf_counter()
            decision = await database.run(_look, lock=DeployLock.NONE, durable=False)
            times.append(time.perf_counter() - began)
        lines[what] = {"ms": _spread(times[1:]), "trips": len(decision.trips), "holds": len(decision.holds)}
    await pool.close()
    return {"jobs": jobs, "waiting": waiting, **lines}


async def _look(tx: Transaction) -> Any:
    """The reads and the decision of a look, as ``balance`` makes it."""
    now = await db.database_now(tx)
    loads, trips = await pressure.loads(tx), await pressure.trips(tx)
    jobs = loads.jobs
    if trips or any(pressure_of(load, now) >= 1 for load in jobs.values()):
        jobs = await pressure.with_edges(tx, jobs)
    await pressure.holds(tx)
    return decide(PressureSnapshot(jobs, {}, PressureSettings()), now)


async def run(only: list[str], quick: bool, folder: Path) -> None:
    if "reaction" in only:
        async with running(folder / "reaction", {"TRACELAKE_PRESSURE_MIN_HOLD_SECONDS": "0"}) as stack:
            say({"workload": "reaction", **await reaction(stack, 8 if quick else ROUNDS)})
    if "throughput" in only:
        async with running(folder / "throughput") as stack:
            found = await throughput(stack, 1_000 if quick else SCOPES, 1 if quick else 6)
            say({"workload": "throughput", **found})
    if "graph" in only:
        async with running(folder / "graph") as stack:
            say({"workload": "graph", **await graph(stack, 1_000, 50_000 if quick else 1_000_000)})


def say(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="reaction,throughput,graph", help="workloads, by comma")
    parser.add_argument("--quick", action="store_true", help="less of it; for trying, not for quoting")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tracelake-bench-") as folder:
        uvloop.run(run(options.only.split(","), options.quick, Path(folder)))


if __name__ == "__main__":
    main()
