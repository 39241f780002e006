"""The function examples as they are printed: pushed, deployed, run by ``tracelake worker --runtime lambda``."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.dev_stack import DevStack, eventually
from tests.support.functions import zip_of
from tests.support.processes import WorkerProcess
from tracelake.client import Client
from tracelake.contracts.user_api import TaskSummary

pytestmark = pytest.mark.xdist_group("lambda")
EXAMPLES = Path(__file__).parents[2] / "examples" / "functions"
ENDED = {"Completed", "Failed", "Canceled"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    folder = tmp_path_factory.mktemp("functions")
    stack = DevStack(folder / "home", folder / "output")
    try:
        handle = stack.until_ready()
        invoker = WorkerProcess(
            stack.home,
            internal_url=handle.internal_url,
            worker_token=handle.worker_token,
            queue_dsn=handle.queue_dsn,
            object_root=Path(handle.object_root),
            runtime="lambda",
            name="invoker",
            environment={"TRACELAKE_QUERY_URL": handle.query_url},
        )
        try:
            asyncio.run(invoker.start())
            yield stack
        finally:
            asyncio.run(invoker.close())
    finally:
        stack.close()


def ask(stack: DevStack, *arguments: str | Path) -> Any:
    run = stack.run(*arguments, "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def ended(stack: DevStack, dag: str, count: int) -> list[TaskSummary]:
    with Client(stack.handle.user_url, stack.handle.user_token) as client:

        def all_ended() -> list[TaskSummary] | None:
            tasks = client.tasks(dag=dag).tasks
            return tasks if len(tasks) >= count and {task.status for task in tasks} <= ENDED else None

        return eventually(f"{count} tasks of {dag} have ended", all_ended)


def test_the_examples_run_in_a_row_and_their_logs_are_shown(stack: DevStack, tmp_path: Path) -> None:
    dag = (EXAMPLES / "dag.yaml").read_text(encoding="utf-8")
    for folder in ("python", "node", "bootstrap"):
        reference = ask(stack, "bundle", "push", EXAMPLES / folder)["bundle"]
        dag = dag.replace(f"bundle: {folder.upper()}", f"bundle: {reference}")
    deployed = tmp_path / "dag.yaml"
    deployed.write_text(dag, encoding="utf-8")
    assert stack.run("deploy", deployed).returncode == 0
    assert stack.run("trigger", "functions/ranges", "--start", "0", "--end", "1999").returncode == 0
    tasks = ended(stack, "functions", 7)
    assert {task.status for task in tasks} == {"Completed"}
    by_job = {name: [task for task in tasks if task.job == name] for name in ("thousands", "halves", "done")}
    assert {name: len(found) for name, found in by_job.items()} == {"thousands": 1, "halves": 2, "done": 4}
    said = {name: stack.run("logs", str(found[0].task_id)).stdout for name, found in by_job.items()}
    assert "thousands: blocks 0 to 1999 in chunks of 1000" in said["thousands"]
    assert "in chunks of 500" in said["halves"]
    assert "an event of " in said["done"]


def job(name: str, bundle: str, entrypoint: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "activation": "reactive",
        "runtime": "lambda",
        "udf": {"bundle": bundle, "entrypoint": entrypoint},
        "inputs": [{"from": {"job": "src", "output": 0}}],
        "outputs": 1,
        "execution_strategy": "PerPartition",
        "timeout_seconds": 60,
        "max_attempts": 1,
        **fields,
    }


SOURCE = {
    "name": "src",
    "activation": "source",
    "runtime": "dispatcher",
    "source": {"kind": "manual"},
    "outputs": 1,
}

PYTHON = """
from tracelake_function import Task, TaskError

def completes(event, context):
    task = Task(event)
    assert task.heartbeat()["cancel"] is False
    task.complete()
    raise ValueError("too late to fail")

def fails(event, context):
    Task(event).fail("not today", retryable=False)

def refused(event, context):
    task = Task(event)
    for call in (lambda: task.query("select * from not_mine"), lambda: task.publish("nothing", [{"a": 1}]),
                 lambda: task.emit_all([{"dataset": "not_mine", "cursor": 1}])):
        try:
            call()
        except TaskError as error:
            print(error.status, error.reason)

def returns_events(event, context):
    return {"events": [{"start": event["inputs"][0]["start"], "end": 4}]}

def returns_nonsense(event, context):
    return {"events": [{"dataset": "not_mine", "cursor": 1}]}
"""
NODE = """
import { Task, TaskError } from "tracelake_function";

export async function completes(event) {
  const task = new Task(event);
  if ((await task.heartbeat()).cancel !== false) throw new Error("canceled");
  await task.complete();
  throw new Error("too late to fail");
}

export const fails = (event) => new Task(event).fail("not today", { retryable: false });

export async function refused(event) {
  const task = new Task(event);
  for (const call of [() => task.query("select * from not_mine"), () => task.publish("nothing", [{ a: 1 }]),
                      () => task.emitAll([{ dataset: "not_mine", cursor: 1 }])]) {
    await call().catch((error) => console.log(error.status, error.reason));
  }
}

export const returns_events = (event) => ({ events: [{ start: event.inputs[0].start, end: 4 }] });
export const returns_nonsense = () => ({ events: [{ dataset: "not_mine", cursor: 1 }] });
"""


@pytest.mark.parametrize(
    ("name", "source"), [("main.py", PYTHON), ("index.mjs", NODE)], ids=["python", "node"]
)
def test_a_function_speaks_for_its_own_task_by_the_client(stack: DevStack, name: str, source: str) -> None:
    module, dag = name.partition(".")[0], f"client_{name.rpartition('.')[2]}"
    with Client(stack.handle.user_url, stack.handle.user_token) as client:
        pushed, _ = client.push_bundle(io.BytesIO(zip_of({name: source})))
        names = ("completes", "fails", "refused", "returns_events", "returns_nonsense")
        jobs = [job(each, pushed.bundle, f"{module}.{each}") for each in names]
        client.deploy(json.dumps({"name": dag, "jobs": [SOURCE, *jobs]}).encode())
        client.trigger(dag, "src", start=0, end=9)
        tasks = {task.job: client.task(task.task_id) for task in ended(stack, dag, len(names))}
    assert {each: tasks[each].status for each in names} == {
        "completes": "Completed",
        "fails": "Failed",
        "refused": "Completed",
        "returns_events": "Completed",
        "returns_nonsense": "Failed",
    }
    assert tasks["fails"].error_message == "not today"
    assert "NotYourDataset" in (tasks["returns_nonsense"].error_message or "")
    said = stack.run("logs", str(tasks["refused"].task_id)).stdout
    assert [line for line in said.splitlines() if line[:1].isdigit()] == [
        "422 InvalidQuery",
        "403 NotYourDataset",
        "403 NotYourDataset",
    ]
    scopes = {each: [(event.start, event.end) for event in tasks[each].events] for each in names}
    assert scopes["completes"] == [(0, 9)]
    assert scopes["returns_events"] == [(0, 4)]


def test_a_noop_runs_on_the_lambda_runtime(stack: DevStack) -> None:
    noop = {**job("work", "", ""), "operator": "noop"}
    del noop["udf"]
    with Client(stack.handle.user_url, stack.handle.user_token) as client:
        client.deploy(json.dumps({"name": "noops", "jobs": [SOURCE, noop]}).encode())
        client.trigger("noops", "src", start=0, end=9)
    assert [task.status for task in ended(stack, "noops", 1)] == ["Completed"]


def test_no_example_is_longer_than_it_says() -> None:
    for name in ("python/main.py", "node/index.mjs", "bootstrap/bootstrap"):
        lines = [line for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(lines) <= 11, name
