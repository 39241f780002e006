"""Whatever happens to a wrapper, its tasks are done once and none of its processes stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.dev_stack import descendants, eventually, is_gone
from tests.support.site import Databases
from tests.support.worker_scene import WorkerScene, open_scene
from tracelake.contracts.user_api import TaskDetail
from tracelake.embedded.postgres import Cluster

OPERATORS = str(Path(__file__).parents[1] / "integration" / "worker" / "wrapper_operators.py")

pytestmark = pytest.mark.xdist_group("wrapper_killed")


@pytest.fixture(scope="module")
def scene(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerScene]:
    with open_scene(Databases.create(cluster), tmp_path_factory.mktemp("killed")) as opened:
        yield opened


def running(scene: WorkerScene, dag: str, operator: str = "sleeps", **fields: object) -> TaskDetail:
    scene.deploy(dag, operator, heartbeat_timeout_seconds=2, **fields)
    scene.trigger(dag)
    return scene.until(dag, "the start", lambda shown: shown.status == "Running")


def test_a_killed_wrapper_leaves_no_process_and_its_task_to_another(scene: WorkerScene) -> None:
    with scene.working("first", "--operators", OPERATORS) as first:
        running(scene, "killed", config={"seconds": 3})
        eventually("the operator runs", lambda: first.events("attempt_running"))
        below = descendants(first.pid)
        assert below
        os.kill(first.pid, signal.SIGKILL)
        for pid in below:
            eventually(f"{pid} is gone", lambda pid=pid: is_gone(pid))
    with scene.working("second", "--operators", OPERATORS):
        shown = scene.ended("killed")
    assert shown.status == "Completed"
    assert [each.outcome for each in shown.attempts] == ["Completed", "TimedOut"]


def test_a_wrapper_that_slept_past_its_lease_drops_what_it_held(scene: WorkerScene) -> None:
    with scene.working("slow", "--operators", OPERATORS) as slow:
        running(scene, "slept", config={"seconds": 4})
        eventually("the operator runs", lambda: slow.events("attempt_running"))
        slow.send(signal.SIGSTOP)
        with scene.working("quick", "--operators", OPERATORS) as quick:
            scene.until("slept", "the takeover", lambda shown: len(shown.attempts) == 2)
            slow.send(signal.SIGCONT)
            eventually("it lets go", lambda: slow.events("attempt_dropped") + slow.events("report_refused"))
            shown = scene.ended("slept")
            assert shown.status == "Completed"
            assert [each.outcome for each in shown.attempts] == ["Completed", "TimedOut"]
            assert shown.attempts[0].worker_id != shown.attempts[1].worker_id
            assert [each["status"] for each in quick.events("attempt_ended")] == ["Completed"]
        assert scene.ran("slept_on", "noop").status == "Completed"


def test_a_worker_that_is_told_to_stop_finishes_what_it_runs(scene: WorkerScene) -> None:
    with scene.working("drained", "--operators", OPERATORS) as worker:
        running(scene, "finishes", config={"seconds": 2})
        eventually("the operator runs", lambda: worker.events("attempt_running"))
        below = descendants(worker.pid)
        worker.send(signal.SIGTERM)
        eventually("it ends", lambda: worker.exit_code is not None)
        assert worker.exit_code == 0
        assert scene.task("finishes").status == "Completed"
        assert all(is_gone(pid) for pid in below)


def test_what_does_not_finish_in_time_is_handed_back_without_using_up_an_attempt(scene: WorkerScene) -> None:
    with scene.working("hasty", "--operators", OPERATORS, "--drain-seconds", "0.5") as worker:
        running(scene, "handed", "deaf", max_attempts=1)
        eventually("the operator runs", lambda: worker.events("attempt_running"))
        worker.send(signal.SIGTERM)
        eventually("it ends", lambda: worker.exit_code is not None)
        assert worker.exit_code == 0
    shown = scene.task("handed")
    assert shown.status == "Queued"
    assert [each.outcome for each in shown.attempts] == ["Released"]
    scene.client.cancel(shown.task_id)


def test_a_second_signal_ends_the_drain_at_once(scene: WorkerScene) -> None:
    with scene.working("patient", "--operators", OPERATORS, "--drain-seconds", "3600") as worker:
        running(scene, "hurried", "deaf")
        eventually("the operator runs", lambda: worker.events("attempt_running"))
        worker.send(signal.SIGTERM)
        eventually("it drains", lambda: worker.events("draining"))
        worker.send(signal.SIGINT)
        eventually("it ends", lambda: worker.exit_code is not None)
        assert worker.exit_code == 0
    shown = scene.task("hurried")
    assert [each.outcome for each in shown.attempts] == ["Released"]
    scene.client.cancel(shown.task_id)


def test_a_source_is_told_to_stop_and_starts_again_elsewhere(scene: WorkerScene) -> None:
    scene.deploy_source("always", "sleeps")
    with scene.working("one", "--operators", OPERATORS, "--drain-seconds", "3600") as one:
        scene.until("always", "the start", lambda shown: shown.status == "Running")
        eventually("the operator runs", lambda: one.events("attempt_running"))
        one.send(signal.SIGTERM)
        eventually("it ends", lambda: one.exit_code is not None)
        assert one.exit_code == 0
    with scene.working("two", "--operators", OPERATORS, "--drain-seconds", "0"):
        shown = scene.until("always", "the next start", lambda shown: len(shown.attempts) == 2)
        assert [each.outcome for each in shown.attempts] == [None, "Released"]
        scene.client.cancel(shown.task_id)


def test_sources_take_no_place_of_other_tasks(scene: WorkerScene) -> None:
    for number in range(3):
        scene.deploy_source(f"for_ever_{number}", "sleeps")
    with scene.working("one", "--operators", OPERATORS, "--concurrency", "1", "--drain-seconds", "0"):
        for number in range(3):
            scene.until(f"for_ever_{number}", "the start", lambda shown: shown.status == "Running")
        assert scene.ran("beside", "noop").status == "Completed"
        for number in range(3):
            scene.client.cancel(scene.task(f"for_ever_{number}").task_id)


def test_an_idle_worker_ends_by_itself(scene: WorkerScene) -> None:
    with scene.working("idle", "--idle-timeout", "1s") as worker:
        eventually("it ends", lambda: worker.exit_code is not None)
        assert worker.exit_code == 0
        assert worker.events("idle_timeout")


def test_an_operator_that_is_killed_with_its_host_fails_and_the_worker_goes_on(scene: WorkerScene) -> None:
    with scene.working("hostless", "--operators", OPERATORS) as worker:
        running(scene, "hostless", config={"seconds": 3}, retry={"base": 0, "max": 1})
        eventually("the operator runs", lambda: worker.events("attempt_running"))
        host, *_ = descendants(worker.pid)
        os.kill(host, signal.SIGKILL)
        shown = scene.until("hostless", "the next attempt", lambda shown: len(shown.attempts) == 2)
        assert shown.attempts[1].outcome == "Failed"
        assert scene.ended("hostless").status == "Completed"
        assert worker.exit_code is None
        assert worker.events("operator_host_died")


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ((), {"TRACELAKE_WORKER_TOKEN": "wrong"}, "token"),
        (("--operators", "no_such_module_of_anybody"), {}, "no_such_module_of_anybody"),
        ((), {"TRACELAKE_SECRETS_FILE": __file__}, "chmod 600"),
        (("--idle-timeout", "soon"), {}, "30s, 10m"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    scene: WorkerScene, options: tuple[str, ...], environment: dict[str, str], said: str
) -> None:
    worker = scene.worker("refused", *options, **environment)
    worker.log_file.unlink(missing_ok=True)
    worker.launch()
    eventually("it ends", lambda: worker.exit_code is not None)
    assert worker.exit_code == 1
    assert said in worker.log().splitlines()[-1]
