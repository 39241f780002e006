"""Many seeds in several processes, on one throwaway Postgres with a database for each, and the report of a
failing seed.

A process takes the next seed when it is done with one, so a slow seed delays no other. The process makes no
difference: a run is a function of its seed. A report has the broken invariant, the events before it, and the
command to repeat it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import queue
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import psycopg
import structlog
import uvloop
from psycopg import sql

from tests.support.databases import build_state_template
from tests.support.postgres import folder_in_memory
from tests.support.simulation.run import Outcome, Simulation
from tracelake.embedded.postgres import Cluster

TEMPLATE = "state"
_SESSIONS = 40
_LOOK_SECONDS = 1.0
COMMAND = "python -m tests.support.simulation"
TAIL = 40


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a seed; ``failure`` has the report of a broken invariant."""

    seed: int
    digest: str
    acknowledged: int
    turns: int
    failure: str | None = None
    rolled_back: list[str] = field(default_factory=list)


def result_of(outcome: Outcome) -> Result:
    return Result(
        outcome.seed,
        outcome.digest,
        outcome.acknowledged,
        len(outcome.lines),
        failure(outcome) if outcome.findings else None,
        outcome.rolled_back,
    )


@contextmanager
def throwaway_postgres(processes: int) -> Iterator[Cluster]:
    """In memory where there is room: nothing of it is wanted afterwards, and a new seed empties every table."""
    folder = Path(tempfile.mkdtemp(prefix="tracelake-simulation-", dir=folder_in_memory()))
    settings = {
        "max_connections": str(_SESSIONS * processes + 10),
        "autovacuum": "off",
        "track_counts": "off",
        "wal_level": "minimal",
        "max_wal_senders": "0",
        "min_wal_size": "64MB",
        "max_wal_size": "256MB",
    }
    cluster = Cluster(folder, name="simulation", settings=settings, throwaway=True)
    try:
        cluster.start()
        cluster.ensure_database(TEMPLATE)
        build_state_template(cluster.dsn(TEMPLATE))
        yield cluster
    finally:
        cluster.stop(timeout=0.0)
        shutil.rmtree(folder, ignore_errors=True)


def clone(cluster: Cluster, index: int) -> str:
    name = f"simulation_{index}"
    with psycopg.connect(cluster.dsn(), autocommit=True) as admin:
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        admin.execute(statement.format(sql.Identifier(name), sql.Identifier(TEMPLATE)))
    return cluster.dsn(name)


def run_all(cluster: Cluster, seeds: Sequence[int], processes: int) -> Iterator[Result]:
    """Results in the order in which they come. Closing the iterator ends the processes."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Result] = context.Queue()
    following = context.Value("q", 0)
    workers = [
        context.Process(target=_work, args=(clone(cluster, index), seeds, following, results), daemon=True)
        for index in range(min(processes, len(seeds)))
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in seeds:
            yield _next(results, workers)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _next(results: Queue[Result], workers: Sequence[BaseProcess]) -> Result:
    while True:
        try:
            return results.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            broken = [worker for worker in workers if worker.exitcode not in (None, 0)]
            if broken:
                raise RuntimeError(f"a process of the simulation ended with {broken[0].exitcode}") from None


def _work(dsn: str, seeds: Sequence[int], following: Synchronized[int], results: Queue[Result]) -> None:
    # Ctrl-C is for the one who reports; it ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_quiet()
    uvloop.run(_run(dsn, seeds, following, results))


async def _run(dsn: str, seeds: Sequence[int], following: Synchronized[int], results: Queue[Result]) -> None:
    simulation = Simulation(dsn)
    await simulation.open()
    # What a run leaves behind is collected between runs: looking for it in the middle of one costs a tenth.
    gc.freeze()
    gc.disable()
    try:
        while (seed := _take(seeds, following)) is not None:
            results.put(result_of(await simulation.run(seed)))
            await asyncio.to_thread(gc.collect)
    finally:
        await simulation.close()


def _take(seeds: Sequence[int], following: Synchronized[int]) -> int | None:
    with following.get_lock():
        if following.value >= len(seeds):
            return None
        seed = seeds[following.value]
        following.value += 1
    return seed


def be_quiet() -> None:
    """What the steps log in passing would add_dead_letter the report."""
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def failure(outcome: Outcome) -> str:
    findings = "\n".join(str(finding) for finding in outcome.findings)
    tail = "\n".join(outcome.lines[-TAIL:])
    return (
        f"seed {outcome.seed} broke an invariant\n{findings}\n"
        f"the last {min(TAIL, len(outcome.lines))} of {len(outcome.lines)} turns:\n{tail}\n"
        f"replay: {COMMAND} --seed {outcome.seed} --trace"
    )
