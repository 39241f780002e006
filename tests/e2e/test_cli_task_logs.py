"""What people see of a task that runs: its progress, its saved state, and its log while it is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support.dev_stack import PATIENCE, DevStack, eventually

pytestmark = pytest.mark.xdist_group("cli")

DAG = """
name: NAME
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: work
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""


class Work:
    """A task of the test's own, worked on by hand."""

    def __init__(self, stack: DevStack, file: Path) -> None:
        self.stack = stack
        name = f"d{uuid4().hex[:8]}"
        file.write_text(DAG.replace("NAME", name))
        for arguments in (("deploy", file), ("trigger", f"{name}/src", "--start", "0", "--end", "9")):
            assert stack.run(*arguments).returncode == 0
        [task] = json.loads(stack.run("tasks", "--dag", name, "--json").stdout)["tasks"]
        self.dag, self.task_id = name, task["task_id"]
        self.fence: dict[str, Any] = {}

    def call(self, path: str, **body: Any) -> dict[str, Any]:
        handle = self.stack.handle
        headers = {"X-Trace-Worker-Token": handle.worker_token}
        answer = httpx.post(f"{handle.internal_url}/internal/{path}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def claim(self) -> None:
        claimed = self.call("task-claim", task_id=self.task_id, worker_id="by-hand")
        self.fence = {name: claimed[name] for name in ("task_id", "attempt", "lease_token")}

    def complete(self, status: str) -> None:
        outputs = [{"output_index": 0, "start": 0, "end": 9}] if status == "Completed" else []
        self.call("task-complete", **self.fence, status=status, outputs=outputs)

    def write(self, attempt: int, text: str) -> None:
        path = self.stack.home / "logs" / "tasks" / self.task_id / f"{attempt}.log"
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("a") as file:
            file.write(text)


@pytest.fixture
def work(stack: DevStack, tmp_path: Path) -> Work:
    return Work(stack, tmp_path / "dag.yaml")


def test_progress_and_saved_state_are_shown(stack: DevStack, work: Work) -> None:
    work.claim()
    assert "PROGRESS" not in stack.run("tasks", "--dag", work.dag).stdout
    work.call("heartbeat", **work.fence, progress={"rows": 10, "stage": "re\x1bad"})
    work.call("task-state", **work.fence, state={"cursor": 5})
    heading, line = stack.run("tasks", "--dag", work.dag).stdout.splitlines()
    assert "PROGRESS" in heading
    assert "rows=10  stage=re ad" in line
    shown = stack.run("task", "show", work.task_id).stdout
    assert "progress     rows=10  stage=re ad\n" in shown
    assert 'saved state  {"cursor":5}\n' in shown
    work.complete("Completed")
    assert "PROGRESS" not in stack.run("tasks", "--dag", work.dag).stdout
    assert "rows=10" in stack.run("task", "show", work.task_id).stdout


def test_a_task_without_a_log_is_told_why(stack: DevStack, work: Work) -> None:
    def refused(*arguments: str) -> str:
        done = stack.run("logs", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        [line] = done.stderr.splitlines()
        return line

    assert "hasn't been claimed yet" in refused(work.task_id)
    assert "hasn't been claimed yet" in refused(work.task_id[:13])
    assert "there is no task" in refused(str(uuid4()))
    work.claim()
    quiet = stack.run("logs", work.task_id)
    assert (quiet.returncode, quiet.stdout) == (0, "")
    assert "it printed nothing" in quiet.stderr
    assert "has had 1 attempts so far" in refused(work.task_id, "--attempt", "2")
    work.complete("Completed")
    followed = stack.run("logs", work.task_id, "-f")
    assert (followed.returncode, followed.stdout) == (0, "")
    assert "it printed nothing" in followed.stderr


def test_a_followed_log_goes_on_to_the_next_attempt_and_ends_with_the_task(
    stack: DevStack, work: Work, tmp_path: Path
) -> None:
    output, errors = tmp_path / "out", tmp_path / "err"
    command = [sys.executable, "-m", "tracelake", "logs", work.task_id[:8], "-f", "--home", str(stack.home)]
    with output.open("wb") as out, errors.open("wb") as err:
        following = subprocess.Popen(command, stdout=out, stderr=err)
    try:
        eventually("it says that it waits", lambda: "waiting" in errors.read_text())
        work.claim()
        work.write(1, "one\n")
        eventually("the first line comes", lambda: output.read_text() == "one\n")
        work.write(1, "half")
        work.complete("Released")
        work.claim()
        work.write(2, "two\n")
        eventually("the next attempt comes", lambda: output.read_text().endswith("two\n"))
        work.write(2, "last words")
        work.complete("Completed")
        assert following.wait(PATIENCE) == 0
    finally:
        following.kill()
        following.wait()
    assert output.read_text() == "one\nhalf\n==> attempt 2 <==\ntwo\nlast words\n"
