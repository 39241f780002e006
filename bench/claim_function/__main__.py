"""Runs the comparison; see the package's docstring."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import UUID, uuid4

from tests.support.databases import ORG, build_state_template
from tracelake import objects
from tracelake.contracts.dispatcher_api import ClaimRequest, TriggerRequest
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import deploy_dag
from tracelake.domain.entropy import Entropy
from tracelake.embedded.postgres import Cluster
from tracelake.store import tasks
from tracelake.store.db import Database, open_pool
from tracelake.store.jobs import JobDefinitions
from tracelake.tokens.signing import PemKeyring

TASKS = 600
DAG = """
name: bench
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: work
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""
FUNCTION = """
CREATE FUNCTION bench_claim(ids uuid[], worker text, leases uuid[])
RETURNS TABLE (task_id uuid, attempt int, epoch bigint, lease_expires_at timestamptz) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM task t WHERE t.task_id = ANY(ids) ORDER BY t.task_id FOR NO KEY UPDATE;
    RETURN QUERY
    WITH started AS (
        UPDATE task t SET status = 'Running', attempt = t.attempt + 1, worker_id = worker,
               lease_token = c.lease, epoch = nextval('epoch_seq'),
               lease_expires_at = tl_now() + make_interval(secs => j.heartbeat_timeout_seconds)
        FROM unnest(ids, leases) AS c(id, lease), job j
        WHERE t.task_id = c.id AND t.status = 'Queued' AND j.job_id = t.job_id
        RETURNING t.task_id, t.attempt, t.lease_token, t.epoch, t.lease_expires_at
    ), history AS (
        INSERT INTO attempt (task_id, attempt, worker_id, lease_token, epoch, claimed_at)
        SELECT s.task_id, s.attempt, worker, s.lease_token, s.epoch, tl_now() FROM started s
    )
    SELECT s.task_id, s.attempt, s.epoch, s.lease_expires_at FROM started s;
END $$
"""


async def queued(ctx: StepContext, pool: Any, start: int) -> list[UUID]:
    for number in range(start, start + TASKS):
        await trigger_source(ctx, "bench", "src", TriggerRequest(start=number, end=number))
    rows = await pool.fetch("SELECT task_id FROM task WHERE status = 'Queued' ORDER BY seq")
    return [row["task_id"] for row in rows]


async def by_steps(ctx: StepContext, ids: list[UUID], batch: int) -> float:
    began = perf_counter()
    for first in range(0, len(ids), batch):
        await claim_tasks(ctx, [ClaimRequest(task_id, "w") for task_id in ids[first : first + batch]])
    return (perf_counter() - began) / len(ids)


async def by_function(pool: Any, ids: list[UUID], batch: int) -> float:
    began = perf_counter()
    async with pool.acquire() as connection:
        for first in range(0, len(ids), batch):
            part = ids[first : first + batch]
            await connection.fetch(
                "SELECT * FROM bench_claim($1, $2, $3)", part, "w", [uuid4() for _ in part]
            )
            rows = await connection.fetch(
                "SELECT job_id, kind, range_start, range_end, seq FROM task WHERE task_id = ANY($1)", part
            )
            await connection.fetch(
                tasks.SQL.claim_inputs,
                part,
                [row["job_id"] for row in rows],
                [row["kind"] for row in rows],
                [row["range_start"] for row in rows],
                [row["range_end"] for row in rows],
                [row["seq"] for row in rows],
            )
    return (perf_counter() - began) / len(ids)


async def compare(dsn: str, folder: Path) -> None:
    pool = await open_pool(f"{dsn}&synchronous_commit=off", min_size=1, max_size=2)
    ctx = StepContext(
        db=Database(pool),
        entropy=Entropy(),
        definitions=JobDefinitions(),
        objects=objects.open(objects.address(folder / "objects")),
        signer=PemKeyring(folder / "keys"),
        runtimes=RuntimeRegistry(),
        org_id=ORG,
    )
    await deploy_dag(ctx, DAG, "bench")
    await pool.execute(FUNCTION)
    start = 0
    for batch in (1, 20):
        for round_number in range(3):
            figures = {"batch": batch, "round": round_number}
            for name in ("steps", "function"):
                ids = await queued(ctx, pool, start)
                start += TASKS
                seconds = await (
                    by_steps(ctx, ids, batch) if name == "steps" else by_function(pool, ids, batch)
                )
                figures[f"{name}_us_per_claim"] = round(seconds * 1e6)
            figures["ratio"] = round(figures["steps_us_per_claim"] / figures["function_us_per_claim"], 2)
            print(json.dumps(figures))
    await pool.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "pg", name="bench") as cluster:
        cluster.ensure_database("bench")
        build_state_template(cluster.dsn("bench"))
        asyncio.run(compare(cluster.dsn("bench"), Path(folder)))


main()
