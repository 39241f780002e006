"""SIGTERM: what is under way is answered, nothing accepted is lost, and the process is gone in time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import asyncpg
import httpx

from tests.support.load import Load
from tests.support.site import Databases, open_single_task, open_site


async def test_replicas_told_to_stop_under_load_leave_nothing_behind(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        Load(site.replicas, databases.queue_dsn, seed=8) as load,
    ):
        load.begin()
        for turn in range(4):
            await load.made_progress(20)
            replica = site.replicas[turn % 2]
            assert await replica.terminate(timeout=10) == 0
            await load.made_progress(5)
            await replica.start()
        await load.finish()
        await site.verify(load.ledger)


async def test_a_request_that_is_under_way_is_answered_before_the_end(
    databases: Databases, tmp_path: Path
) -> None:
    async with open_site(databases, tmp_path, replicas=1) as site, open_single_task(site.replicas[0]) as task:
        [replica] = site.replicas
        claim = await task.claimed(replica)
        connection = await asyncpg.connect(databases.state_dsn)
        try:
            async with connection.transaction():
                await connection.execute(
                    "SELECT 1 FROM task WHERE task_id = $1 FOR UPDATE", UUID(task.task_id)
                )
                completing = asyncio.create_task(task.complete(replica, claim))
                await databases.until("SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted)")
                ending = asyncio.create_task(replica.terminate(timeout=10))
                while "dispatcher stopping" not in replica.log():
                    await asyncio.sleep(0.02)
                assert await refused(replica.internal_url)
        finally:
            await connection.close()
        answer = await completing
        assert (answer.status_code, answer.json()["task_status"]) == (200, "Completed")
        assert await ending == 0


async def refused(url: str) -> bool:
    """Whether new connections are turned away, as soon as they are."""
    async with asyncio.timeout(5):
        while True:
            try:
                async with httpx.AsyncClient(timeout=1.0, trust_env=False) as http:
                    await http.get(f"{url}/healthz")
            except httpx.TransportError:
                return True
            await asyncio.sleep(0.02)
