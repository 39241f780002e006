"""Real files and real rows, with somebody killed, stopped or out of space in the middle: committed once, or never.

Attempts write their number into each row, so what was committed names its writer.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import asyncpg
import pyarrow.parquet as pq
import pytest

from tests.support.dev_stack import descendants, eventually, is_gone
from tests.support.processes import WorkerProcess
from tests.support.proxies import Forwarder
from tests.support.site import Databases
from tests.support.worker_scene import WorkerScene, open_scene
from tracelake.contracts.user_api import TaskDetail
from tracelake.embedded.postgres import Cluster
from tracelake.hot.install import WRITER_ROLE, install
from tracelake.queue.postgres import PostgresQueue
from tracelake.settings import Secret

OPERATORS = ("--operators", str(Path(__file__).with_name("fault_operators.py")))
VICTIM = "victim\n"
PASSWORD = Secret("a-password-of-the-tests")
PARQUET = [{"name": "rows", "storage": "parquet"}]
POSTGRES = [{"name": "rows", "storage": "postgres"}]
ALL_ROWS = "SELECT format('SELECT block_number, attempt FROM data.%I ORDER BY block_number', $1::text)"
LIMIT = 256 * 1024

pytestmark = pytest.mark.xdist_group("worker_faults")


@pytest.fixture(scope="module")
def scene(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerScene]:
    with open_scene(Databases.create(cluster), tmp_path_factory.mktemp("faults")) as opened:
        yield opened


@pytest.fixture(scope="module")
def data_dsn(cluster: Cluster) -> str:
    name = f"data_{uuid4().hex[:8]}"
    cluster.ensure_database(name)
    passwords = dict.fromkeys(("writer_password", "reader_password"), PASSWORD)
    asyncio.run(install(cluster.dsn(name), **passwords))
    return cluster.dsn(name)


def test_a_killed_operator_is_followed_by_an_attempt_that_commits_once(scene: WorkerScene) -> None:
    with scene.working("operatorless", *OPERATORS) as worker:
        linger(scene, "operator_killed")
        os.kill(victim(worker), signal.SIGKILL)
        shown = scene.ended("operator_killed")
        assert [each.outcome for each in shown.attempts] == ["Completed", "Failed"]
        assert "SIGKILL" in (shown.attempts[1].error_message or "")
        assert committed_by(scene, shown) == {2}


def test_a_killed_wrapper_is_followed_by_an_attempt_that_commits_once(scene: WorkerScene) -> None:
    with scene.working("dies", *OPERATORS) as first:
        linger(scene, "wrapper_killed")
        operator = victim(first)
        os.kill(first.pid, signal.SIGKILL)
        eventually("its operator is gone", lambda: is_gone(operator))
    with scene.working("heir", *OPERATORS):
        shown = scene.ended("wrapper_killed")
    assert [each.outcome for each in shown.attempts] == ["Completed", "TimedOut"]
    assert committed_by(scene, shown) == {2}
    assert len(staged(scene, shown)) == 2, "both have written files"


async def test_a_killed_dispatcher_costs_no_attempt_and_the_files_are_committed_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    databases = await asyncio.to_thread(Databases.create, cluster)
    opened = open_scene(databases, tmp_path)
    scene = await asyncio.to_thread(opened.__enter__)
    try:
        async with Forwarder(scene.replica.internal_url) as way:
            worker = scene.worker("survivor", *OPERATORS, internal_url=way.url)
            try:
                await worker.start()
                await asyncio.to_thread(linger, scene, "dispatcher_killed", seconds=2)
                way.cut()
                await scene.replica.kill()
                await worker.logged("attempt_ended")
                await scene.replica.start()
                way.lead_to(scene.replica.internal_url)
                scene.reconnect()
                shown = await asyncio.to_thread(scene.ended, "dispatcher_killed")
            finally:
                await worker.close()
        assert [each.outcome for each in shown.attempts] == ["Completed"]
        assert committed_by(scene, shown) == {1}
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)


async def test_files_of_a_wrapper_that_slept_past_its_lease_never_appear(scene: WorkerScene) -> None:
    shown = await overtaken(scene, "slept_files", "holds_files", PARQUET, "Completed")
    assert committed_by(scene, shown) == {2}
    assert len(await asyncio.to_thread(staged, scene, shown)) == 2, "both have written files"


async def test_rows_of_a_wrapper_that_slept_past_its_lease_are_refused_by_the_data_database(
    scene: WorkerScene, data_dsn: str
) -> None:
    roles = {"TRACELAKE_DATA_WRITE_DSN": role_dsn(data_dsn, WRITER_ROLE)}
    # Its Dispatcher is out of its reach: nothing but the fence beside the data can tell it that it is late.
    shown = await overtaken(scene, "slept_rows", "holds_rows", POSTGRES, "Failed", **roles)
    [output] = shown.outputs
    assert [(each.start, each.end, each.row_count) for each in output.partitions] == [(0, 9, 10)]
    connection = await asyncpg.connect(data_dsn)
    try:
        name = f"d_{output.dataset_version.hex}"
        rows = await connection.fetch(await connection.fetchval(ALL_ROWS, name))
        assert [tuple(row) for row in rows] == [(block, 2) for block in range(10)]
    finally:
        await connection.close()


async def overtaken(
    scene: WorkerScene, dag: str, operator: str, outputs: list[dict[str, str]], end: str, **more: Any
) -> TaskDetail:
    """A wrapper is stopped, another does its task, and the first one wakes up where only its operator is heard."""
    async with Forwarder(scene.replica.internal_url) as way:
        slow = scene.worker(f"{dag}_slow", *OPERATORS, internal_url=way.url, **more)
        quick = scene.worker(f"{dag}_quick", *OPERATORS, **more)
        try:
            await slow.start()
            await asyncio.to_thread(linger, scene, dag, operator, outputs, seconds=2)
            slow.send(signal.SIGSTOP)
            way.cut()
            await quick.start()
            shown = await asyncio.to_thread(scene.ended, dag)
            assert [each.outcome for each in shown.attempts] == ["Completed", "TimedOut"]
            slow.send(signal.SIGCONT)
            [told] = await slow.logged("attempt_ended")
            assert (told["attempt"], told["status"]) == (1, end)
            assert end == "Completed" or "a newer attempt has begun" in told["error"]
            way.lead_to(scene.replica.internal_url)
            [refused] = await slow.logged("report_refused")
            assert refused["reason"] in ("StaleAttempt", "StaleLease")
            after = await asyncio.to_thread(scene.task, dag)
            assert (after.attempts, after.outputs) == (shown.attempts, shown.outputs)
            return after
        finally:
            await slow.close()
            await quick.close()


@pytest.mark.parametrize("what", ["folder", "output"])
def test_a_full_disk_fails_the_attempt_and_the_worker_goes_on(scene: WorkerScene, what: str) -> None:
    """No file of the worker or its operators may grow beyond a limit: what a full disk is to a writer."""
    with files_limited_to(LIMIT), scene.working(f"full_{what}", *OPERATORS) as worker:
        dag = f"full_{what}"
        config = {"what": what, "limit": LIMIT}
        shown = scene.ran(dag, "fills_the_disk", outputs=PARQUET, config=config, max_attempts=2)
        assert [each.outcome for each in shown.attempts] == ["Failed", "Failed"]
        assert "File too large" in (shown.error_message or "")
        assert shown.outputs[0].partitions == []
        log = worker.home / "logs" / "tasks" / str(shown.task_id) / "1.log"
        assert log.stat().st_size == LIMIT, "what has no room is lost, and nobody waits for it"
        assert worker.exit_code is None
        small = scene.ran(f"small_{what}", "holds_files", outputs=PARQUET, config={"seconds": 0})
        assert (small.status, committed_by(scene, small)) == ("Completed", {1})


def test_a_forged_wake_up_for_another_runtime_costs_the_task_no_attempt(scene: WorkerScene) -> None:
    with scene.working("misled", *OPERATORS) as worker:
        scene.deploy("elsewhere", "noop", runtime="ecs_spark", max_attempts=1)
        scene.trigger("elsewhere")
        task_id = str(scene.task("elsewhere").task_id)

        async def forge() -> None:
            queue = await PostgresQueue.open(scene.databases.queue_dsn)
            try:
                await queue.publish("ecs_python", [{"task_id": task_id}])
            finally:
                await queue.close()

        asyncio.run(forge())
        eventually("it is told apart", lambda: worker.events("wrong_runtime"))
        shown = scene.until("elsewhere", "its return", lambda shown: shown.status == "Queued")
        assert [each.outcome for each in shown.attempts] == ["Released"]
        assert shown.failures == 0
        scene.client.cancel(shown.task_id)


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """For this process and all that it starts meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def linger(
    scene: WorkerScene,
    dag: str,
    operator: str = "holds_files",
    outputs: list[dict[str, str]] = PARQUET,
    seconds: float = 600,
) -> None:
    """Returns when the first attempt has written everything and waits."""
    strategy = {"outputs": outputs, "update_strategy": "replace"}
    scene.deploy(dag, operator, heartbeat_timeout_seconds=2, config={"seconds": seconds}, **strategy)
    scene.trigger(dag)
    scene.until(dag, "what it wrote", lambda shown: bool(shown.attempts and shown.attempts[0].progress))


def victim(worker: WorkerProcess) -> int:
    [pid] = [pid for pid in descendants(worker.pid) if Path(f"/proc/{pid}/comm").read_text() == VICTIM]
    return pid


def staged(scene: WorkerScene, shown: TaskDetail) -> list[Path]:
    objects = scene.folder / "dispatcher" / "objects"
    return sorted(path for path in objects.rglob("*.parquet") if str(shown.task_id) in str(path))


def committed_by(scene: WorkerScene, shown: TaskDetail) -> set[int]:
    """Whose rows readers see: of one partition, complete, and of that writer's own files."""
    [output] = shown.outputs
    [partition] = output.partitions
    assert (partition.start, partition.end, partition.row_count, partition.current) == (0, 9, 10, True)
    folder = Path(unquote(urlsplit(partition.location or "").path))
    tables = [pq.read_table(path) for path in staged(scene, shown) if path.is_relative_to(folder)]
    assert sorted(block for table in tables for block in table["block_number"].to_pylist()) == list(range(10))
    return {attempt for table in tables for attempt in table["attempt"].to_pylist()}


def role_dsn(dsn: str, role: str) -> str:
    scheme, rest = dsn.split("://", 1)
    return f"{scheme}://{role}:{PASSWORD.reveal()}@{rest.split('@', 1)[1]}"
