"""A worker goes on through outages: of its queue, and of the Dispatcher in the middle of a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import WorkerProcess
from tests.support.proxies import CuttingProxy, Forwarder
from tests.support.site import Databases
from tests.support.worker_scene import WorkerScene, open_scene
from tracelake.embedded.postgres import Cluster

OPERATORS = str(Path(__file__).parents[1] / "integration" / "worker" / "wrapper_operators.py")


@pytest.fixture
def scene(cluster: Cluster, tmp_path: Path) -> Iterator[WorkerScene]:
    with open_scene(Databases.create(cluster), tmp_path) as opened:
        yield opened


@asynccontextmanager
async def working(scene: WorkerScene, **more: Any) -> AsyncIterator[WorkerProcess]:
    worker = scene.worker("worker", "--operators", OPERATORS, **more)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.close()


async def test_a_queue_that_is_gone_for_a_while_is_waited_for_and_said_once(scene: WorkerScene) -> None:
    async with (
        CuttingProxy(scene.databases.queue_dsn) as proxy,
        working(scene, queue_dsn=proxy.dsn) as worker,
    ):
        assert (await asyncio.to_thread(scene.ran, "before", "noop")).status == "Completed"
        proxy.refusing = True
        proxy.cut_all()
        await asyncio.to_thread(scene.deploy, "during", "noop")
        await asyncio.to_thread(scene.trigger, "during")
        await worker.logged("queue_away")
        proxy.refusing = False
        assert (await asyncio.to_thread(scene.ended, "during")).status == "Completed"
        await worker.logged("queue_back")
        assert len(worker.events("queue_away")) == 1
        assert worker.exit_code is None


async def test_an_operator_goes_on_while_the_dispatcher_is_killed_and_started_again(
    scene: WorkerScene,
) -> None:
    async with Forwarder(scene.replica.internal_url) as way, working(scene, internal_url=way.url) as worker:
        await asyncio.to_thread(
            scene.deploy, "through", "sleeps", config={"seconds": 3}, heartbeat_timeout_seconds=4
        )
        await asyncio.to_thread(scene.trigger, "through")
        await worker.logged("attempt_running")
        way.cut()
        await scene.replica.kill()
        await worker.logged("dispatcher_away")
        await worker.logged("attempt_ended")
        await scene.replica.start()
        way.lead_to(scene.replica.internal_url)
        scene.reconnect()
        shown = await asyncio.to_thread(scene.ended, "through")
        assert shown.status == "Completed"
        assert [each.outcome for each in shown.attempts] == ["Completed"]
        await worker.logged("dispatcher_back")
        assert len(worker.events("dispatcher_away")) == 1


async def test_a_worker_waits_for_a_dispatcher_that_is_not_there_yet(scene: WorkerScene) -> None:
    async with Forwarder(scene.replica.internal_url) as way:
        way.cut()
        worker = scene.worker("worker", internal_url=way.url)
        try:
            worker.launch()
            await worker.logged("dispatcher_away")
            way.lead_to(scene.replica.internal_url)
            await worker.logged("worker_ready")
        finally:
            await worker.close()
