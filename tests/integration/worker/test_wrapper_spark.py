"""A worker with a Spark of its own: tasks on it, and what becomes of them when either is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.dev_stack import descendants, eventually, is_gone
from tests.support.postgres import SharedPostgres
from tests.support.processes import WorkerProcess
from tests.support.worker_scene import WorkerScene, shared_scene
from tracelake.contracts.user_api import TaskDetail
from tracelake.sandbox.accounts import is_ours

OPERATORS = str(Path(__file__).with_name("wrapper_operators.py"))
SPARK = "ecs_spark"

pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture(scope="module")
def scene(
    postgres_cluster: SharedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerScene]:
    with shared_scene(postgres_cluster, tmp_path_factory.mktemp("spark")) as opened:
        yield opened


@pytest.fixture(scope="module")
def worker(scene: WorkerScene) -> Iterator[WorkerProcess]:
    with scene.working("worker", "--operators", OPERATORS, runtime=SPARK) as working:
        yield working


def spinning(scene: WorkerScene, dag: str, operator: str = "spins", **more: Any) -> TaskDetail:
    scene.deploy(dag, operator, runtime=SPARK, heartbeat_timeout_seconds=4, **more)
    scene.trigger(dag)
    return scene.until(dag, "Spark's work", lambda shown: bool(shown.attempts and shown.attempts[0].progress))


def java_of(worker: WorkerProcess) -> int:
    [java] = [pid for pid in descendants(worker.pid) if name_of(pid) == "java\n"]
    return java


def name_of(pid: int) -> str:
    """Empty for one that has ended since it was listed."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_task_runs_on_spark_and_tells_its_progress(scene: WorkerScene, worker: WorkerProcess) -> None:
    shown = scene.ran("select", "selects", runtime=SPARK)
    assert shown.status == "Completed", shown.attempts
    assert "stages" in (shown.attempts[0].progress or {})


def test_spark_and_operators_are_users_of_their_own_that_see_nothing_of_each_other(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    java = java_of(worker)
    beside = [pid for pid in descendants(worker.pid) if namespace_of(pid) == namespace_of(java)]
    others = {pid: uid_of(pid) for pid in descendants(worker.pid) if pid not in beside}
    assert {namespace_of(pid) for pid in others}.isdisjoint({namespace_of(java)})
    if os.geteuid() == 0:
        assert is_ours(uid_of(java))
        assert uid_of(java) not in others.values()
        assert {uid for uid in others.values() if not is_ours(uid)} == {0}


def namespace_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def uid_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[0])


def test_a_canceled_task_leaves_spark_to_others(scene: WorkerScene, worker: WorkerProcess) -> None:
    task = spinning(scene, "canceled")
    scene.client.cancel(task.task_id)
    eventually(
        "it is let go",
        lambda: [each for each in worker.events("attempt_ended") if each["task_id"] == str(task.task_id)],
    )
    assert scene.ran("after_cancel", "selects", runtime=SPARK).status == "Completed"


def test_a_task_that_times_out_leaves_spark_to_others(scene: WorkerScene, worker: WorkerProcess) -> None:
    spinning(scene, "late", timeout_seconds=3, max_attempts=1)
    assert "timed out" in (scene.ended("late").error_message or "")
    assert scene.ran("after_timeout", "selects", runtime=SPARK).status == "Completed"


def test_a_spark_that_is_killed_fails_its_tasks_and_they_are_committed_once(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    spinning(scene, "bereft", "spins_once", max_attempts=2, outputs=[{"name": "rows", "storage": "parquet"}])
    java = java_of(worker)
    os.kill(java, signal.SIGKILL)
    shown = scene.ended("bereft")
    assert shown.status == "Completed", shown.attempts
    assert shown.failures == 1, "those that found no Spark were handed back, and cost nothing"
    assert "Spark" in (shown.attempts[-1].error_message or "")
    [partition] = shown.outputs[0].partitions
    assert (partition.start, partition.end, partition.row_count) == (0, 9, 10)
    assert java_of(worker) != java
    assert worker.exit_code is None


def test_the_worker_takes_its_spark_along(scene: WorkerScene, worker: WorkerProcess) -> None:
    below = descendants(worker.pid)
    worker.send(signal.SIGTERM)
    eventually("it ends", lambda: worker.exit_code is not None)
    assert worker.exit_code == 0
    for pid in below:
        assert is_gone(pid)
