"""A backfill whose command and Dispatcher are killed in the middle goes on where it was: each chunk runs once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.dev_stack import eventually
from tests.support.proxies import Forwarder
from tests.support.site import Databases
from tests.support.worker_scene import BackfillScene, WorkerScene, open_scene
from tracelake.embedded.postgres import Cluster

OPERATORS = str(Path(__file__).parents[1] / "integration" / "cli" / "backfill_operators.py")
RANGE = ("--from", "0", "--to", "119")


@pytest.fixture
def scene(cluster: Cluster, tmp_path: Path) -> Iterator[WorkerScene]:
    with open_scene(Databases.create(cluster), tmp_path) as opened:
        yield opened


async def test_the_command_and_the_dispatcher_are_killed_and_every_chunk_runs_once(
    scene: WorkerScene,
) -> None:
    async with Forwarder(scene.replica.internal_url) as way, Forwarder(scene.replica.user_url) as entrance:
        worker = scene.worker("worker", "--operators", OPERATORS, internal_url=way.url)
        try:
            await worker.start()
            backfill = await asyncio.to_thread(
                BackfillScene, scene, "killed", url=entrance.url, concurrency=2, seconds=0.2
            )
            first = await asyncio.to_thread(backfill.start, *RANGE, "--order", "newest")
            await asyncio.to_thread(
                eventually, "a first chunk is committed", lambda: backfill.committed() >= 2
            )
            first.kill()
            first.communicate()
            # Held until the second has looked: on a busy machine all would be done before it starts.
            await asyncio.to_thread(scene.client.set_paused, "killed", "ingest", True)
            second = await asyncio.to_thread(backfill.start, *RANGE)
            assert second.stdout is not None
            assert "120 blocks in 12 chunks of 10" in await asyncio.to_thread(second.stdout.readline)
            seen = await asyncio.to_thread(backfill.committed)
            await asyncio.to_thread(scene.client.set_paused, "killed", "ingest", False)
            await asyncio.to_thread(eventually, "it goes on", lambda: backfill.committed() > seen)
            for each in (way, entrance):
                each.cut()
            await scene.replica.kill()
            await scene.replica.start()
            way.lead_to(scene.replica.internal_url)
            entrance.lead_to(scene.replica.user_url)
            scene.reconnect()
            said, errors = await asyncio.to_thread(second.communicate, timeout=120)
        finally:
            await worker.close()
    assert second.returncode == 0, errors
    assert "all 120 blocks are committed" in said
    assert backfill.scopes() == Counter((start, start + 9) for start in range(0, 120, 10))
    assert Counter(task.status for task in backfill.tasks()) == {"Completed": 12}
    assert [len(scene.client.task(task.task_id).attempts) for task in backfill.tasks()] == [1] * 12
