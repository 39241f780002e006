"""An invoker that is killed or stopped while functions run: nothing of them stays, no task waits for a lease."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Iterator

import pytest

from tests.support.dev_stack import descendants, eventually, is_gone
from tests.support.functions import python_bundle
from tests.support.processes import WorkerProcess
from tests.support.proxies import Forwarder
from tests.support.site import Databases
from tests.support.worker_scene import WorkerScene, open_scene
from tracelake.contracts.user_api import TaskDetail
from tracelake.embedded.postgres import Cluster

FIRST_SLEEPS = python_bundle(
    """
import os, subprocess, time

def handler(event, context):
    print("attempt", event["attempt"], flush=True)
    if event["attempt"] <= event["config"].get("sleep_until", 1):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
"""
)
LONG = 3600
"""Seconds that a lease would last: whoever waits for it fails the test."""


@pytest.fixture(scope="module")
def scene(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerScene]:
    with open_scene(Databases.create(cluster), tmp_path_factory.mktemp("invokers")) as opened:
        yield opened


def running(scene: WorkerScene, invoker: WorkerProcess, dag: str) -> TaskDetail:
    """Its function has begun."""
    bundle, _ = scene.client.push_bundle(io.BytesIO(FIRST_SLEEPS))
    udf = {"bundle": bundle.bundle, "entrypoint": "main.handler"}
    scene.deploy(dag, "udf", runtime="lambda", udf=udf, timeout_seconds=LONG)
    scene.trigger(dag)
    task = scene.until(dag, "the start", lambda shown: shown.status == "Running")
    eventually("the function's first line", lambda: "attempt 1" in log_of(invoker, task, 1))
    return task


def log_of(invoker: WorkerProcess, task: TaskDetail, attempt: int) -> str:
    path = invoker.home / "logs" / "tasks" / str(task.task_id) / f"{attempt}.log"
    return path.read_text() if path.exists() else ""


def functions_of(invoker: WorkerProcess) -> list[int]:
    return descendants(invoker.pid)


def test_a_terminated_invoker_hands_its_tasks_back_without_costing_an_attempt(scene: WorkerScene) -> None:
    with scene.working("stopped", "--drain-seconds", "0", runtime="lambda") as invoker:
        running(scene, invoker, "stopped")
        left = functions_of(invoker)
        invoker.send(signal.SIGTERM)
        eventually("the invoker has ended", lambda: invoker.exit_code is not None)
        assert invoker.exit_code == 0, invoker.log()[-2000:]
        assert all(map(is_gone, left))
        shown = scene.task("stopped")
        assert shown.status == "Queued"
        assert shown.attempts[0].outcome == "Released", (shown.attempts, invoker.log()[-3000:])
    with scene.working("other", runtime="lambda"):
        assert scene.ended("stopped").status == "Completed"


def test_an_invoker_finishes_what_it_runs_before_it_stops(scene: WorkerScene) -> None:
    source = python_bundle(
        "import time\ndef handler(event, context):\n    print('in', flush=True)\n    time.sleep(1)\n"
    )
    bundle, _ = scene.client.push_bundle(io.BytesIO(source))
    udf = {"bundle": bundle.bundle, "entrypoint": "main.handler"}
    with scene.working("drains", runtime="lambda") as invoker:
        scene.deploy("drains", "udf", runtime="lambda", udf=udf, timeout_seconds=LONG)
        scene.trigger("drains")
        task = scene.until("drains", "the start", lambda shown: shown.status == "Running")
        # An invoker that was killed before is known for a while longer; what it is offered comes back unharmed.
        eventually("the function's first line", lambda: log_of(invoker, task, scene.task("drains").attempt))
        invoker.send(signal.SIGTERM)
        eventually("the invoker has ended", lambda: invoker.exit_code is not None)
        ended = scene.task("drains")
        [last, *before] = ended.attempts
        assert (ended.status, last.outcome) == ("Completed", "Completed")
        assert {each.outcome for each in before} <= {"Released"}


async def test_a_function_that_ends_while_the_dispatcher_is_away_is_completed_later(
    scene: WorkerScene,
) -> None:
    source = """
import pathlib, time
def handler(event, context):
    print("in", flush=True)
    time.sleep(1)
    print("out", flush=True)
"""
    bundle, _ = scene.client.push_bundle(io.BytesIO(python_bundle(source)))
    udf = {"bundle": bundle.bundle, "entrypoint": "main.handler"}
    async with Forwarder(scene.replica.internal_url) as way:
        invoker = scene.worker("cut_off", runtime="lambda", internal_url=way.url)
        try:
            await invoker.start()
            scene.deploy("away", "udf", runtime="lambda", udf=udf, timeout_seconds=LONG)
            scene.trigger("away")
            task = scene.until("away", "the start", lambda shown: shown.status == "Running")
            await asyncio.to_thread(eventually, "its first line", lambda: "in" in log_of(invoker, task, 1))
            way.cut()
            await invoker.logged("dispatcher_away")
            await asyncio.to_thread(eventually, "its last line", lambda: "out" in log_of(invoker, task, 1))
            assert scene.task("away").status == "Running"
            way.lead_to(scene.replica.internal_url)
            ended = await asyncio.to_thread(scene.ended, "away")
            assert (ended.status, ended.attempt) == ("Completed", 1)
        finally:
            await invoker.close()


def test_an_invoker_without_work_ends_by_itself_when_told_to(scene: WorkerScene) -> None:
    with scene.working("idle", "--idle-timeout", "1s", runtime="lambda") as invoker:
        eventually("it has ended", lambda: invoker.exit_code is not None)
        assert invoker.exit_code == 0


# The last of all: a killed invoker stays known for a while, and would be offered the others' functions.
def test_a_killed_invoker_takes_its_functions_along_and_its_successor_reports_them(
    scene: WorkerScene,
) -> None:
    with scene.working("killed", runtime="lambda") as invoker:
        task = running(scene, invoker, "killed")
        left = functions_of(invoker)
        assert len(left) >= 4
        invoker.send(signal.SIGKILL)
        eventually("every process of the sandbox is gone", lambda: all(map(is_gone, left)))
    assert scene.task("killed").status == "Running"
    with scene.working("killed", runtime="lambda") as successor:
        ended = scene.ended("killed")
        assert ended.status == "Completed"
        [last, *between, first] = ended.attempts
        assert (first.outcome, last.outcome) == ("Failed", "Completed")
        # The dead invoker is known for a while longer; what is offered to it comes back unharmed.
        assert {each.outcome for each in between} <= {"Released"}
        assert "the invoker ended while the function ran" in (first.error_message or "")
        assert f"attempt {last.attempt}" in log_of(successor, task, last.attempt)
