"""What a worker makes of one attempt, with a real Dispatcher and real operator processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.dev_stack import descendants, eventually
from tests.support.postgres import SharedPostgres
from tests.support.processes import WorkerProcess
from tests.support.worker_scene import WorkerScene, shared_scene
from tracelake.queue.postgres import PostgresQueue

OPERATORS = str(Path(__file__).with_name("wrapper_operators.py"))

pytestmark = pytest.mark.xdist_group("wrapper")


@pytest.fixture(scope="module")
def scene(
    postgres_cluster: SharedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerScene]:
    with shared_scene(postgres_cluster, tmp_path_factory.mktemp("wrapper")) as opened:
        yield opened


@pytest.fixture(scope="module")
def worker(scene: WorkerScene) -> Iterator[WorkerProcess]:
    with scene.working(
        "worker", "--operators", OPERATORS, TRACELAKE_SECRET_API_KEY="hush-hush-key"
    ) as working:
        yield working


def test_a_noop_is_completed_and_its_output_committed(scene: WorkerScene, worker: WorkerProcess) -> None:
    shown = scene.ran("noop", "noop")
    assert shown.status == "Completed"
    assert [event.start for event in shown.events] == [0]
    assert [each.outcome for each in shown.attempts] == ["Completed"]


def test_a_worker_counts_how_attempts_end_and_is_counted_itself(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    assert scene.ran("counted", "noop").status == "Completed"
    [url] = re.findall(r'"(http://[^"]+/metrics)"', worker.log())

    def sample(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(httpx.get(url).text)
        found = [each for family in families for each in family.samples if each.name == name]
        return sum(each.value for each in found if labels.items() <= each.labels.items())

    # The report is answered before the end is counted, and the page is a moment old.
    ended = partial(sample, "tracelake_attempts_ended_total", runtime="ecs_python", status="Completed")
    eventually("the end is counted", lambda: ended() >= 1)
    assert sample("tracelake_attempt_seconds_count", runtime="ecs_python") >= 1
    assert sample("tracelake_attempt_slots", runtime="ecs_python") == 2
    counted = 'tracelake_workers{runtime="ecs_python"} 1.0'
    page = f"{scene.replica.internal_url}/metrics"
    assert eventually("the worker is counted", lambda: counted in httpx.get(page).text)


def log_of(worker: WorkerProcess, scene: WorkerScene, dag: str, attempt: int = 1) -> str:
    path = worker.home / "logs" / "tasks" / str(scene.task(dag).task_id) / f"{attempt}.log"
    return eventually(f"the log of {dag}", lambda: path.read_text() if path.exists() else None)


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("killed", "SIGKILL"),
        ("exits", "3"),
        ("babbles", "ended before it had finished"),
        ("says_nothing", "ValueError"),
    ],
)
def test_an_operator_that_breaks_fails_retryably_and_says_how(
    scene: WorkerScene, worker: WorkerProcess, operator: str, said: str
) -> None:
    shown = scene.ran(operator, operator, max_attempts=2)
    assert shown.status == "Failed"
    assert [each.outcome for each in shown.attempts] == ["Failed", "Failed"]
    for attempt in shown.attempts:
        assert said in (attempt.error_message or "")
    assert said in log_of(worker, scene, operator)


def test_an_unknown_operator_is_not_tried_again(scene: WorkerScene, worker: WorkerProcess) -> None:
    shown = scene.ran("unknown", "nobodys_operator")
    assert shown.status == "Failed"
    assert len(shown.attempts) == 1
    assert "nobodys_operator" in (shown.attempts[0].error_message or "")


def test_progress_and_state_reach_the_task_and_its_output_the_log(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    shown = scene.ran("talks", "talks")
    assert shown.status == "Completed", shown.attempts
    progress = shown.attempts[0].progress or {}
    assert (progress["done"], progress["total"], progress["message"]) == (1, 2, "half")
    assert shown.state == {"seen": None}
    assert "said by the operator" in log_of(worker, scene, "talks")


def test_the_next_attempt_finds_what_the_last_one_saved(scene: WorkerScene, worker: WorkerProcess) -> None:
    shown = scene.ran("again", "fails_once")
    assert [each.outcome for each in shown.attempts] == ["Completed", "Failed"]
    assert "first attempt 1" in (shown.attempts[1].error_message or "")


def test_an_operator_sees_its_own_variables_and_nothing_of_the_workers(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    shown = scene.ran("environment", "shows_environment", secrets=["api_key", "API_KEY"])
    assert shown.status == "Completed", shown.attempts
    log = log_of(worker, scene, "environment")
    names = {line.partition("=")[0] for line in log.splitlines() if "=" in line}
    assert {"TRACE_TASK_CAPABILITY_TOKEN", "TRACE_TASK_ID", "TRACE_ATTEMPT", "API_KEY", "api_key"} <= names
    assert not {name for name in names if name.startswith("TRACELAKE_")}
    token = scene.replica.worker_headers["X-Trace-Worker-Token"]
    for hidden in (token, scene.databases.queue_dsn, "hush-hush-key"):
        assert hidden not in log


def test_a_secret_in_a_failure_is_taken_out(scene: WorkerScene, worker: WorkerProcess) -> None:
    config = {"raises": True}
    shown = scene.ran("leaks", "shows_environment", secrets=["API_KEY"], config=config, max_attempts=1)
    said = shown.attempts[0].error_message or ""
    assert "the key is" in said
    assert "hush-hush-key" not in said + log_of(worker, scene, "leaks") + worker.log()


def test_a_secret_in_the_progress_is_taken_out(scene: WorkerScene, worker: WorkerProcess) -> None:
    shown = scene.ran("blabs", "shows_environment", secrets=["API_KEY"], config={"tells": True})
    assert (shown.attempts[0].progress or {})["message"] == "with •••"


def test_a_missing_secret_is_named_and_not_tried_again(scene: WorkerScene, worker: WorkerProcess) -> None:
    shown = scene.ran("secretless", "noop", secrets=["RPC_KEY"])
    assert shown.status == "Failed"
    assert [each.attempt for each in shown.attempts] == [1]
    assert "no secret RPC_KEY" in (shown.attempts[0].error_message or "")


@pytest.mark.parametrize("operator", ["sleeps", "deaf"])
def test_a_canceled_attempt_ends_whether_it_listens_or_not(
    scene: WorkerScene, worker: WorkerProcess, operator: str
) -> None:
    dag = f"cancel_{operator}"
    scene.deploy(dag, operator, heartbeat_timeout_seconds=2)
    scene.trigger(dag)
    task = scene.until(dag, "the start", lambda shown: shown.status == "Running")
    assert log_of(worker, scene, dag)
    scene.client.cancel(task.task_id)
    assert scene.ended(dag).status == "Canceled"
    told = eventually(
        "the worker's word",
        lambda: [each for each in worker.events("attempt_ended") if each["task_id"] == str(task.task_id)],
    )
    assert [each["status"] for each in told] == ["Canceled"]


def test_a_timeout_ends_the_attempt_with_all_its_processes(scene: WorkerScene, worker: WorkerProcess) -> None:
    before = set(descendants(worker.pid))
    shown = scene.ran("late", "deaf", timeout_seconds=1, max_attempts=1)
    assert "timed out" in (shown.attempts[0].error_message or "")
    assert "timed out" in log_of(worker, scene, "late")
    started = set(descendants(worker.pid)) - before
    assert len(started) <= 2, "only warm operators may be new"


def test_heartbeats_keep_a_lease_that_is_shorter_than_the_work(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    shown = scene.ran("long", "sleeps", heartbeat_timeout_seconds=1, config={"seconds": 4})
    assert shown.status == "Completed"
    assert len(shown.attempts) == 1


def test_a_wake_up_that_names_no_task_or_an_unknown_one_is_dropped(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    forged: list[dict[str, object]] = [
        {},
        {"task_id": None},
        {"task_id": 7},
        {"task_id": "no uuid"},
        {"task_id": str(uuid4())},
        {"task_id": str(uuid4()), "more": ["x" * 10_000]},
    ]

    async def publish() -> int:
        queue = await PostgresQueue.open(scene.databases.queue_dsn)
        try:
            await queue.publish("ecs_python", forged)
            async with asyncio.timeout(30):
                while (depth := await queue.depth("ecs_python")).visible + depth.in_flight:
                    await asyncio.sleep(0.05)
            return depth.dead
        finally:
            await queue.close()

    assert asyncio.run(publish()) == 0
    assert len(worker.events("wake_up_malformed")) == 4
    assert scene.ran("afterwards", "noop").status == "Completed"


def test_a_task_that_is_woken_many_times_runs_once(scene: WorkerScene, worker: WorkerProcess) -> None:
    scene.deploy("woken", "sleeps", config={"seconds": 1})
    scene.trigger("woken")
    task_id = str(scene.task("woken").task_id)

    async def publish() -> None:
        queue = await PostgresQueue.open(scene.databases.queue_dsn)
        try:
            await queue.publish("ecs_python", [{"task_id": task_id}] * 20)
        finally:
            await queue.close()

    asyncio.run(publish())
    shown = scene.ended("woken")
    assert shown.status == "Completed"
    assert len(shown.attempts) == 1
    assert len([each for each in worker.events("attempt_ended") if each["task_id"] == task_id]) == 1


def test_many_short_tasks_are_all_done_once(scene: WorkerScene, worker: WorkerProcess) -> None:
    scene.deploy("many", "noop")
    scene.trigger("many", [(number * 10, number * 10 + 9) for number in range(200)])

    def all_done() -> bool:
        tasks = scene.client.tasks(dag="many", limit=500).tasks
        return len(tasks) == 200 and {task.status for task in tasks} == {"Completed"}

    eventually("all of them", all_done)
    assert {task.attempt for task in scene.client.tasks(dag="many", limit=500).tasks} == {1}


def test_files_that_an_operator_writes_are_committed_and_read_by_the_next_job(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    job = {
        "name": "reader",
        "activation": "reactive",
        "runtime": "ecs_python",
        "operator": "reads",
        "inputs": [{"from": {"job": "work", "output": 0}}],
        "outputs": [{"name": "seen", "storage": "none"}],
        "execution_strategy": "PerPartition",
    }
    scene.deploy("files", "writes", outputs=[{"name": "rows", "storage": "parquet"}], more=[job])
    scene.trigger("files")

    def both_done() -> bool:
        tasks = scene.client.tasks(dag="files").tasks
        assert not [task for task in tasks if task.status == "Failed"]
        return [task.status for task in tasks] == ["Completed"] * 2

    eventually("both jobs", both_done)
    [reader] = scene.client.tasks(dag="files", job="reader").tasks
    assert (scene.client.task(reader.task_id).attempts[0].progress or {})["rows"] == 10


def test_a_second_worker_takes_its_share(scene: WorkerScene, worker: WorkerProcess) -> None:
    with scene.working("second", "--operators", OPERATORS) as second:
        scene.deploy("shared", "sleeps", config={"seconds": 0.3})
        scene.trigger("shared", [(number * 10, number * 10 + 9) for number in range(16)])

        def all_done() -> bool:
            tasks = scene.client.tasks(dag="shared").tasks
            return len(tasks) == 16 and {task.status for task in tasks} == {"Completed"}

        eventually("all of them", all_done)
        assert second.events("attempt_ended")
        assert [each for each in worker.events("attempt_ended") if each["job"] == "shared/work"]
