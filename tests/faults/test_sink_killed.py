"""A sink may be killed, stopped or cut off anywhere: no record is lost or written twice, no event is missing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
import pytest_asyncio

from tests.support.buffer_scene import BufferScene, Publisher, open_buffer_scene
from tests.support.proxies import ClientMessage, Cut, CuttingProxy, Forwarder
from tracelake.embedded.postgres import Cluster

SHORT_LEASE = """UPDATE job SET heartbeat_timeout_seconds = 1, retry_base_seconds = 0
                 WHERE operator = 'buffer_sink'"""
AT_ONCE = (
    "UPDATE tracelake_queue.messages SET visible_at = tracelake_queue.clock() WHERE queue LIKE 'buffer-%'"
)
MOST = "SELECT key, count(*) FROM {} GROUP BY key HAVING count(*) > 1"


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferScene]:
    with open_buffer_scene(cluster, tmp_path_factory.mktemp("sinks")) as opened:
        opened.deploy()
        asyncio.run(_execute(opened.site.databases.state_dsn, SHORT_LEASE))
        yield opened


@pytest_asyncio.fixture
async def scene(deployed: BufferScene) -> AsyncIterator[BufferScene]:
    yield deployed
    await deployed.close()


@pytest_asyncio.fixture
async def publisher(scene: BufferScene) -> Publisher:
    return await scene.publisher()


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def taken_up(scene: BufferScene, name: str, *keys: str) -> None:
    """The next sink writes them, says so, and nothing is there twice."""
    await _execute(scene.site.databases.queue_dsn, AT_ONCE)
    async with scene.sinking(name):
        await scene.until_has(*keys)
        [(highest,)] = await scene.rows("SELECT max(position) FROM {}")
        await scene.until("the event", lambda: scene.cursor() == highest)
        await scene.until_acknowledged()
    assert await scene.rows(MOST) == []


def before_commit(message: ClientMessage) -> Cut:
    return Cut.HOLD if message.kind == "Q" and message.text.startswith("COMMIT") else Cut.NONE


async def test_killed_before_its_commit(scene: BufferScene, publisher: Publisher) -> None:
    async with CuttingProxy(scene.writing_dsn) as proxy:
        async with scene.sinking("one", data_write_dsn=proxy.dsn) as sink:
            await sink.logged("sink_drains")
            proxy.policy = before_commit
            await publisher.publish({"key": "before commit 1"}, {"key": "before commit 2"})
            await proxy.held.wait()
            await sink.kill()
        assert not {"before commit 1", "before commit 2"} & set(await scene.keys())
    await taken_up(scene, "two", "before commit 1", "before commit 2")


async def test_killed_after_its_commit_and_before_its_event(scene: BufferScene, publisher: Publisher) -> None:
    async with (
        Forwarder(scene.site.replica.internal_url) as way,
        scene.sinking("three", internal_url=way.url) as sink,
    ):
        await sink.logged("sink_drains")
        known = scene.cursor()
        way.cut()
        await publisher.publish({"key": "before event"})
        await scene.until_has("before event")
        await sink.kill()
        assert scene.cursor() == known
    await taken_up(scene, "four", "before event")


async def test_killed_after_its_event_and_before_its_acknowledgement(
    scene: BufferScene, publisher: Publisher
) -> None:
    async with (
        Forwarder(scene.site.replica.internal_url) as way,
        CuttingProxy(scene.site.databases.queue_dsn) as queue,
        scene.sinking("five", internal_url=way.url, queue_dsn=queue.dsn) as sink,
    ):
        await sink.logged("sink_drains")
        known = scene.cursor() or 0
        way.cut()
        await publisher.publish({"key": "before ack"})
        await scene.until_has("before ack")
        queue.stall()
        way.lead_to(scene.site.replica.internal_url)
        await scene.until("the event", lambda: scene.cursor() == known + 1)
        await sink.kill()
        assert await scene.waiting() == 1
    await taken_up(scene, "six", "before ack")
    assert scene.cursor() == known + 1


async def test_one_that_slept_through_its_lease_writes_nothing_beside_its_successor(
    scene: BufferScene, publisher: Publisher
) -> None:
    async with (
        CuttingProxy(scene.writing_dsn) as proxy,
        scene.sinking("sleeper", data_write_dsn=proxy.dsn) as sleeper,
    ):
        await sleeper.logged("sink_drains")
        proxy.policy = before_commit
        await publisher.publish({"key": "held", "note": "by the sleeper"})
        await proxy.held.wait()
        sleeper.send(signal.SIGSTOP)
        proxy.cut_all()
        proxy.policy = lambda _: Cut.NONE
        async with scene.sinking("successor") as successor:
            await successor.logged("sink_drains")
            await publisher.publish({"key": "new"})
            await scene.until_has("new")
            sleeper.send(signal.SIGCONT)
            await sleeper.logged("sink_ended")
            await _execute(scene.site.databases.queue_dsn, AT_ONCE)
            await scene.until_has("held", "new")
            await scene.until_acknowledged()
    assert await scene.rows(MOST) == []


async def test_outages_of_the_data_database_and_of_the_dispatcher_are_waited_out(
    scene: BufferScene, publisher: Publisher
) -> None:
    async with (
        Forwarder(scene.site.replica.internal_url) as way,
        CuttingProxy(scene.writing_dsn) as proxy,
        scene.sinking("patient", data_write_dsn=proxy.dsn, internal_url=way.url) as sink,
    ):
        await sink.logged("sink_drains")
        proxy.refusing = True
        proxy.cut_all()
        await publisher.publish({"key": "while data was away"})
        await sink.logged("sink_waits")
        await scene.lease_passes()
        proxy.refusing = False
        await scene.until_has("while data was away")
        assert len(sink.events("sink_drains")) == 1, "it kept its lease"
        way.cut()
        await publisher.publish({"key": "while the dispatcher was away"})
        await sink.logged("dispatcher_away")
        way.lead_to(scene.site.replica.internal_url)
        await scene.until_has("while the dispatcher was away")
        await scene.until_acknowledged()


async def test_a_sink_that_is_told_to_stop_hands_its_dataset_back(
    scene: BufferScene, publisher: Publisher
) -> None:
    async with scene.sinking("leaving") as leaving:
        await leaving.logged("sink_drains")
        await publisher.publish({"key": "before it left"})
        await scene.until_has("before it left")
        leaving.send(signal.SIGTERM)
        assert await leaving.ended() == 0
    assert [each["status"] for each in leaving.events("attempt_reported")] == ["Released"]
    assert await scene.waiting() == 0
