"""The state database goes away and comes back: callers are told to wait, and nothing is lost meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests.support.load import Load
from tests.support.processes import DispatcherProcess
from tests.support.site import LEASE_SECONDS, Databases, open_single_task, open_site
from tracelake.embedded.postgres import Cluster


async def crash(cluster: Cluster, number: signal.Signals) -> None:
    assert cluster.pid is not None
    os.kill(cluster.pid, number)
    await asyncio.to_thread(cluster.stop)


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGKILL])
async def test_work_goes_on_after_a_crash_of_the_state_database(
    cluster: Cluster, databases: Databases, tmp_path: Path, number: signal.Signals
) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        Load(site.replicas, databases.queue_dsn, seed=3) as load,
    ):
        load.begin()
        for _ in range(2):
            await load.made_progress(30)
            await crash(cluster, number)
            await site.until_ready(503)
            await asyncio.gather(*(refuses_politely(replica) for replica in site.replicas))
            await asyncio.to_thread(cluster.start)
            await site.until_ready(200)
        await load.made_progress(30)
        await load.finish()
        await site.verify(load.ledger)
        assert load.ledger.repeats["StateUnavailable"]


async def refuses_politely(replica: DispatcherProcess) -> None:
    """503 with a reason on every surface; the process itself is alive."""
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        assert (await http.get(f"{replica.internal_url}/healthz")).status_code == 200
        claim = {"task_id": "00000000-0000-4000-8000-000000000000", "worker_id": "w"}
        answers = [
            await http.post(
                f"{replica.internal_url}/internal/task-claim", json=claim, headers=replica.worker_headers
            ),
            await http.get(f"{replica.user_url}/v1/tasks", headers=replica.user_headers),
            await http.post(f"{replica.user_url}/v1/dags", content="name: x", headers=replica.user_headers),
        ]
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["reason"] == "StateUnavailable"
        assert "postgresql://" not in answer.text


async def test_after_an_outage_the_reaper_listens_for_a_lease_before_it_reaps(
    cluster: Cluster, databases: Databases, tmp_path: Path
) -> None:
    async with open_site(databases, tmp_path) as site, open_single_task(site.replicas[0]) as task:
        one, other = site.replicas
        claim = await task.claimed(one)
        await crash(cluster, signal.SIGQUIT)
        assert (await task.beat(other, claim)).status_code == 503
        expired = datetime.fromisoformat(claim["lease_expires_at"])
        await asyncio.sleep(max(0.0, (expired - datetime.now(UTC)).total_seconds()))
        await asyncio.to_thread(cluster.start)
        await site.until_ready()
        await databases.until_past(datetime.now(UTC) + timedelta(seconds=LEASE_SECONDS / 2))
        assert (await task.beat(other, claim)).status_code == 200
        shown = await task.becomes(one, "Queued")
        assert [each["outcome"] for each in shown["attempts"]] == ["TimedOut"]
        assert (await task.complete(one, claim)).status_code == 200


async def test_a_dispatcher_started_without_its_database_says_so_and_ends(
    cluster: Cluster, databases: Databases, tmp_path: Path
) -> None:
    await crash(cluster, signal.SIGQUIT)
    late = DispatcherProcess(tmp_path, state_dsn=databases.state_dsn, queue_dsn=databases.queue_dsn)
    try:
        late.launch()
        assert await late.ended(timeout=30) != 0
        assert "state database" in late.log()
        assert "Traceback" not in late.log()
        assert databases.state_dsn not in late.log()
    finally:
        await asyncio.to_thread(cluster.start)
    await late.start()
    await late.close()
