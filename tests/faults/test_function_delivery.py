"""Dispatchers die and are stopped while they hand functions over; no attempt reaches an invoker twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx

from tests.support.functions import ScriptedInvoker, scripted_invoker
from tests.support.processes import DispatcherProcess
from tests.support.site import Databases, Site, alarms_in, open_site
from tracelake.contracts.bundles import Invocation

TASKS = 40
DAG = """
name: fn
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: work
    activation: reactive
    runtime: lambda
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
    heartbeat_timeout_seconds: 1
    retry: { base: 0, max: 1 }
    max_attempts: 20
"""


async def deploy(http: httpx.AsyncClient, site: Site, invoker: ScriptedInvoker) -> None:
    replica = site.replicas[0]
    answer = await http.post(f"{replica.user_url}/v1/dags", content=DAG, headers=replica.user_headers)
    assert answer.status_code == 201, answer.text
    await register(http, replica, invoker)


async def register(http: httpx.AsyncClient, replica: DispatcherProcess, invoker: ScriptedInvoker) -> None:
    answer = await http.post(
        f"{replica.internal_url}/internal/invoker",
        json={"url": invoker.url, "concurrency": 4},
        headers=replica.worker_headers,
    )
    assert answer.status_code == 200, answer.text


@asynccontextmanager
async def registered(
    http: httpx.AsyncClient, replica: DispatcherProcess, invoker: ScriptedInvoker
) -> AsyncIterator[None]:
    async def again() -> None:
        while True:
            await register(http, replica, invoker)
            await asyncio.sleep(1.0)

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()


async def trigger(http: httpx.AsyncClient, replica: DispatcherProcess, number: int) -> None:
    answer = await http.post(
        f"{replica.user_url}/v1/sources/fn/src/trigger",
        json={"start": number * 10, "end": number * 10 + 9},
        headers=replica.user_headers,
    )
    assert answer.status_code == 202, answer.text


async def report(http: httpx.AsyncClient, replica: DispatcherProcess, task: Invocation) -> int:
    """What a function does at its end, with its own token."""
    span = task.inputs[0]
    answer = await http.post(
        f"{replica.internal_url}/v1/task/complete",
        json={
            "task_id": str(task.task_id),
            "attempt": task.attempt,
            "lease_token": str(task.lease_token),
            "status": "Completed",
            "outputs": [{"output_index": 0, "start": span.start, "end": span.end, "row_count": 0}],
        },
        headers={"X-Trace-Task-Capability": task.capability_token},
    )
    return answer.status_code


async def old_leases_run_out(databases: Databases) -> None:
    """As if more than ten minutes had passed for what was claimed a few seconds ago."""
    connection = await asyncpg.connect(databases.state_dsn)
    try:
        await connection.execute(
            "UPDATE task t SET lease_expires_at = tl_now() - interval '1 second' FROM attempt a"
            " WHERE t.status = 'Running' AND a.task_id = t.task_id AND a.attempt = t.attempt"
            " AND a.claimed_at < tl_now() - interval '3 seconds'"
        )
    finally:
        await connection.close()


async def test_a_replica_killed_while_it_hands_over_repeats_no_attempt_and_loses_no_task(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        scripted_invoker() as invoker,
        httpx.AsyncClient(timeout=20.0, trust_env=False) as http,
    ):
        survivor, victim = site.replicas
        await deploy(http, site, invoker)
        async with registered(http, survivor, invoker):
            for number in range(TASKS):
                await trigger(http, victim if number % 2 else survivor, number)
                if number == TASKS // 2:
                    await victim.kill()
                    await victim.start()
            reported = completed = 0
            async with asyncio.timeout(60):
                while completed < TASKS:
                    for task in invoker.taken[reported:]:
                        reported += 1
                        completed += await report(http, survivor, task) == 200
                    await old_leases_run_out(databases)
                    await asyncio.sleep(0.1)
        assert max(invoker.attempts_taken.values()) == 1
        await databases.until("SELECT count(*) = $1 FROM task WHERE status = 'Completed'", TASKS)
        assert [line for replica in site.replicas for line in alarms_in(replica.log())] == []


async def test_a_replica_that_is_told_to_stop_gives_back_what_waits_for_a_slot(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        scripted_invoker(then=429) as invoker,
        httpx.AsyncClient(timeout=20.0, trust_env=False) as http,
    ):
        survivor, stopped = site.replicas
        await deploy(http, site, invoker)
        async with registered(http, survivor, invoker):
            await trigger(http, stopped, 0)
            await invoker.until_asked(2)
            assert await stopped.terminate() == 0
            await databases.until("SELECT EXISTS (SELECT 1 FROM attempt WHERE outcome = 'Released')")
            invoker.then = 202
            [taken] = await invoker.until_taken(1)
            assert taken.attempt >= 2
            assert await report(http, survivor, taken) == 200
