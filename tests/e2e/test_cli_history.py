"""The commands that look back and begin: explain, dag versions and rollback, init, status, on a running stack."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support.dev_stack import DevStack
from tracelake.cli import failures
from tracelake.cli.main import app
from tracelake.evm.rpc.config import load_pools

pytestmark = pytest.mark.xdist_group("cli")

Run = Callable[..., tuple[int, str, str]]

DAG = """
name: NAME
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: first
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""
SECOND = """
  - name: second
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: first, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process, as ``main`` runs it: exit code, stdout, stderr."""
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        try:
            failures.run(lambda: app([str(each) for each in arguments], prog_name="tracelake"), debug=False)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


@pytest.fixture
def dag() -> str:
    return f"h{uuid4().hex[:8]}"


def said(run: Run, *arguments: str | Path) -> str:
    code, out, err = run(*arguments)
    assert code == 0, err
    return out


def told(run: Run, *arguments: str | Path) -> Any:
    return json.loads(said(run, *arguments, "--json"))


def complete(stack: DevStack, task_id: str) -> None:
    handle = stack.handle
    headers = {"X-Trace-Worker-Token": handle.worker_token}
    with httpx.Client(base_url=handle.internal_url, headers=headers, trust_env=False) as worker:
        body: dict[str, Any] = {"task_id": task_id, "worker_id": "worker-1"}
        claimed = worker.post("/internal/task-claim", json=body).json()
        fence = {name: claimed[name] for name in ("task_id", "attempt", "lease_token")}
        output = {"output_index": 0, "start": 0, "end": 99, "row_count": 0}
        done = {**fence, "status": "Completed", "outputs": [output]}
        assert worker.post("/internal/task-complete", json=done).status_code == 200


def test_a_task_and_a_range_are_explained(stack: DevStack, run: Run, dag: str, tmp_path: Path) -> None:
    home = ("--home", stack.home)
    file = tmp_path / "dag.yaml"
    file.write_text(DAG.replace("NAME", dag) + SECOND)
    said(run, "deploy", file, *home)
    said(run, "trigger", f"{dag}/src", "--start", "0", "--end", "99", *home)
    for job in ("first", "second"):
        [task] = told(run, "tasks", "--dag", dag, "--job", job, *home)["tasks"]
        complete(stack, task["task_id"])
    shown = said(run, "explain", task["task_id"], *home).splitlines()
    assert shown[0].startswith(f"{dag}/second 0-99  Completed")
    assert any("attempt 1 claimed by worker-1" in line for line in shown)
    assert any(f"{dag}/src/" in line and "sent by a person or a program" in line for line in shown)
    assert shown[-1].endswith("from the first event to the last step")
    assert [each["job"] for each in told(run, "explain", task["task_id"], *home)["tasks"]] == [
        "second",
        "first",
    ]
    made = said(run, "explain", f"{dag}/second:50-199", *home)
    assert task["task_id"] in made
    assert "100-199" in made
    same = told(run, "explain", f"{dag}/second", "--from", "50", "--to", "199", *home)
    assert [(gap["start"], gap["end"]) for gap in same["gaps"]] == [(100, 199)]
    dataset = same["dataset_uuid"]
    assert told(run, "explain", dataset, *home)["end"] == 99
    unknown, out, err = run("explain", str(uuid4()), *home)
    assert (unknown, out) == (1, "")
    assert "there is no task and no dataset" in err
    assert run("explain", f"{dag}/second:0-9", "--from", "1", *home)[0] == 2


def test_a_dag_goes_back_to_the_version_before(stack: DevStack, run: Run, dag: str, tmp_path: Path) -> None:
    home = ("--home", stack.home)
    file = tmp_path / "dag.yaml"
    first = DAG.replace("NAME", dag)
    file.write_text(first)
    said(run, "dag", "deploy", file, *home)
    code, _, err = run("dag", "rollback", dag, "--yes", *home)
    assert (code, err) == (1, f"error: {dag} has no version before 1, the active one\n")
    file.write_text(first + SECOND)
    assert "+ second: added" in said(run, "dag", "plan", file, *home)
    said(run, "deploy", file, *home)
    assert f"{dag}  2" in " ".join(said(run, "dag", "list", "--limit", "1000", *home).split("\n"))
    listed = told(run, "dag", "versions", dag, *home)
    assert [(each["version"], each["active"], each["jobs"]) for each in listed["versions"]] == [
        (2, True, 3),
        (1, False, 2),
    ]
    assert said(run, "dag", "show", dag, "--version", "1", *home) == first
    assert said(run, "dag", "show", dag, *home) == first + SECOND
    code, out, err = run("dag", "rollback", dag, *home)
    assert code == 2, "no terminal to ask for confirmation"
    assert "- second: removed" in out
    assert "--yes" in err
    assert told(run, "dag", "versions", dag, *home)["active_version"] == 2
    assert said(run, "dag", "rollback", dag, "--yes", *home).endswith(
        f"{dag} is at version 1, 2 jobs active\n"
    )
    assert told(run, "dag", "rollback", dag, "--to", "2", "--yes", *home)["deployed"]["dag_version"] == 2
    assert run("dag", "rollback", dag, "--to", "9", "--yes", *home)[0] == 1
    assert run("dag", "versions", "nothing_like_it", *home)[0] == 1


def test_what_init_writes_deploys_as_it_is(stack: DevStack, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "my chain"
    written = said(run, "init", folder)
    steps = [line.strip() for line in written.splitlines() if line.startswith("  tracelake ")]
    assert [step.split()[1] for step in steps] == ["devchain", "dev", "deploy"]
    assert steps[2] == f"tracelake deploy '{folder / 'dag.yaml'}'"
    assert stat.S_IMODE((folder / "rpc.toml").stat().st_mode) == 0o600
    pool = load_pools(folder / "rpc.toml")["main"]
    assert (pool.chain_id, [each.name for each in pool.endpoints]) == (31339, ["devchain"])
    home = ("--home", stack.home)
    deployed = told(run, "deploy", folder / "dag.yaml", *home)
    assert deployed["dag_name"] == "my_chain"
    [chain] = [each for each in told(run, "status", *home)["chains"] if each["dag_name"] == "my_chain"]
    assert (chain["job"], chain["condition"], chain["running"]) == ("follower", "queued", False)
    before = (folder / "dag.yaml").read_bytes()
    code, out, err = run("init", folder)
    assert (code, out) == (1, "")
    assert "nothing was written" in err
    (folder / "rpc.toml").unlink()
    assert run("init", folder)[0] == 1
    assert not (folder / "rpc.toml").exists()
    assert (folder / "dag.yaml").read_bytes() == before


def test_status_says_who_paused_a_job_and_how_far_a_chain_is(
    stack: DevStack, run: Run, dag: str, tmp_path: Path
) -> None:
    home = ("--home", stack.home)
    file = tmp_path / "dag.yaml"
    follower = """
  - name: tip
    activation: source
    source: { kind: always_on }
    runtime: ecs_python
    operator: block_follower
    outputs: [{ name: blocks }]
    config: { rpc_pool: main, chain_id: 1, start_block: 0 }
"""
    file.write_text(DAG.replace("NAME", dag) + follower)
    said(run, "deploy", file, *home)
    said(run, "trigger", f"{dag}/src", "--start", "0", "--end", "9", *home)
    said(run, "pause", f"{dag}/first", *home)
    [task] = told(run, "tasks", "--dag", dag, "--job", "tip", *home)["tasks"]
    handle = stack.handle
    headers = {"X-Trace-Worker-Token": handle.worker_token}
    with httpx.Client(base_url=handle.internal_url, headers=headers, trust_env=False) as worker:
        body = {"task_id": task["task_id"], "worker_id": "w"}
        claimed = worker.post("/internal/task-claim", json=body).json()
        fence = {name: claimed[name] for name in ("task_id", "attempt", "lease_token")}
        progress = {"head": 120, "tip": 100, "lag": 20, "finalized": 60, "reorgs": 2, "deepest_reorg": 3}
        beat = {**fence, "progress": {**progress, "message": "following the tip"}}
        assert worker.post("/internal/heartbeat", json=beat).status_code == 200
    status = said(run, "status", *home)
    [line] = [line for line in status.splitlines() if line.split()[:2] == [f"{dag}/tip", "120"]]
    assert line.split()[1:] == [
        *("120", "100", "20", "blocks", "60", "2", "(deepest", "3)", "-", "following", "the", "tip"),
    ]
    [line] = [line for line in status.splitlines() if f"{dag}/first is paused" in line]
    assert "by " in line
    assert f"tracelake resume {dag}/first" in line
    [row] = [
        row for row in told(run, "status", *home)["jobs"] if (row["dag_name"], row["job"]) == (dag, "first")
    ]
    assert (row["state"], row["queued"]) == ("paused", 1)
    assert row["oldest_queued_seconds"] >= 0
