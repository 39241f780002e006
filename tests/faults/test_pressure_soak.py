"""An overload for as long as ``SECONDS`` says: a fast source and a backfill, one slow consumer, and workers
killed in turn. The queue stays within its bound, normal work overtakes the bulk that waits, and every scope is done
once.

``make soak-pressure`` runs it for longer; ``make test`` leaves it out.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.support.dev_stack import eventually
from tests.support.postgres import SharedPostgres
from tests.support.processes import WorkerProcess
from tests.support.worker_scene import MANUAL_SOURCE, WorkerScene, shared_scene
from tracelake.client import Client
from tracelake.domain.errors import TracelakeError

SECONDS = float(os.environ.get("SECONDS", "30"))
DEPTH = 40
CHUNKS = 5
RUNNING = 4 * CHUNKS
"""What the splitter's tasks may still emit that run when the queue trips."""
OVERTAKES = """WITH claimed AS (
    SELECT t.bulk, t.created_at, a.claimed_at FROM task t JOIN job j USING (job_id)
    JOIN attempt a ON a.task_id = t.task_id AND a.attempt = 1 WHERE j.name = 'slow')
SELECT n.claimed_at < b.claimed_at AS overtook FROM claimed n JOIN claimed b
    ON b.bulk AND NOT n.bulk AND b.created_at < n.created_at AND n.created_at < b.claimed_at"""
"""Each normal task of the last job with each bulk one that waited when it came."""
OVERTAKING = 0.8
"""Not all: a worker may have received the bulk task already, and the wake-up of the normal one is under way."""

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("soak")]


@pytest.fixture
def scene(postgres_cluster: SharedPostgres, tmp_path: Path) -> Iterator[WorkerScene]:
    with shared_scene(postgres_cluster, tmp_path) as opened:
        yield opened


def dag() -> dict[str, Any]:
    def job(name: str, source: str, **fields: Any) -> dict[str, Any]:
        return {
            "name": name,
            "activation": "reactive",
            "runtime": "ecs_python",
            "operator": "noop",
            "inputs": [{"from": {"job": source, "output": 0}}],
            "outputs": [{"name": name, "storage": "none"}],
            "execution_strategy": "PerPartition",
            **fields,
        }

    split = job("split", "src", runtime="dispatcher", operator="range_splitter", config={"chunk_size": 1})
    slow = job("slow", "feed", max_queue_depth=DEPTH, scaling={"max_concurrency": 1})
    return {"name": "soak", "jobs": [MANUAL_SOURCE, split, job("feed", "split"), slow]}


def start(scene: WorkerScene, name: str) -> WorkerProcess:
    worker = scene.worker(name)
    asyncio.run(worker.start())
    return worker


def scopes(client: Client) -> list[str]:
    """The committed scopes of the last job, page by page."""
    [output] = client.datasets(dag="soak", job="slow").datasets
    found: list[str] = []
    first = 0
    while page := client.partitions(str(output.dataset_uuid), start=first, limit=1000).partitions:
        found += [each.partition_key for each in page]
        first = page[-1].end + 1
    return found


async def overtaking(dsn: str) -> list[bool]:
    connection = await asyncpg.connect(dsn)
    try:
        return [row["overtook"] for row in await connection.fetch(OVERTAKES)]
    finally:
        await connection.close()


def test_a_queue_keeps_its_bound_whatever_dies(scene: WorkerScene) -> None:
    rng = random.Random(1)
    scene.client.deploy(json.dumps(dag()).encode())
    workers = [start(scene, f"w{number}") for number in range(2)]
    asked, deepest, held = 0, 0, 0
    ends, next_kill = time.monotonic() + SECONDS, time.monotonic() + 3
    # A slow machine may take longer to fill the queue than it is given.
    while time.monotonic() < ends or (not held and time.monotonic() < ends + 120):
        with suppress(TracelakeError):
            scene.client.trigger(
                "soak",
                "src",
                start=asked * CHUNKS,
                end=(asked + 1) * CHUNKS - 1,
                priority=rng.choice(["normal", "bulk"]),
            )
            asked += 1
            report = scene.client.pressure()
            deepest = max([deepest, *(job.waiting for job in report.jobs)])
            held += bool(report.holds)
        if time.monotonic() > next_kill:
            victim = rng.randrange(2)
            os.kill(workers[victim].pid, signal.SIGKILL)
            asyncio.run(workers[victim].close())
            workers[victim] = start(scene, f"w{time.monotonic_ns()}")
            next_kill = time.monotonic() + 5
    assert held, "it was never full"
    wanted = asked * CHUNKS
    deadline = time.monotonic() + 300
    while len(done := scopes(scene.client)) < wanted:
        assert time.monotonic() < deadline, f"{len(done)} of {wanted}: {scene.client.pressure()}"
        time.sleep(0.5)
    assert set(Counter(done).values()) == {1}
    met = asyncio.run(overtaking(scene.databases.state_dsn))
    assert sum(met) > OVERTAKING * len(met) > 0, f"{sum(met)} of {len(met)}"
    # Normal work is held only when the queue has twice its threshold.
    assert deepest <= 2 * DEPTH + RUNNING, deepest
    eventually("all are released", lambda: not scene.client.pressure().holds)
    for worker in workers:
        asyncio.run(worker.close())
