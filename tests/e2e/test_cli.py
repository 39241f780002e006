"""The command line against a real stack: what people see, what programs get, and how commands fail."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from tests.support.dev_stack import DevStack, tracelake

pytestmark = pytest.mark.xdist_group("cli")

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
  - name: second
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: first, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
publish:
  NAME_firsts: { from: { job: first, output: 0 } }
"""
BROKEN = """\
name: broken
jobs:
  - name: work
    activation: reactive
    runtime: nowhere
    operator: noop
    inputs: [{ from: { job: missing, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
    colour: red
"""


@pytest.fixture
def dag() -> str:
    """A name of the test's own: tests share the stack, not their DAGs."""
    return f"d{uuid4().hex[:8]}"


@pytest.fixture
def file(tmp_path: Path, dag: str) -> Path:
    path = tmp_path / "dag.yaml"
    path.write_text(DAG.replace("NAME", dag))
    return path


def said(stack: DevStack, *arguments: str | Path) -> str:
    done = stack.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(stack: DevStack, *arguments: str | Path) -> Any:
    return json.loads(said(stack, *arguments, "--json"))


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def deployed_task(stack: DevStack, dag: str, file: Path) -> str:
    said(stack, "deploy", file)
    assert said(stack, "trigger", f"{dag}/src", "--start", "0", "--end", "99").endswith("1 task created\n")
    [task] = told(stack, "tasks", "--dag", dag, "--job", "first")["tasks"]
    return str(UUID(task["task_id"]))


def claim(stack: DevStack, task_id: str) -> dict[str, Any]:
    body = {"task_id": task_id, "worker_id": "worker-1"}
    claimed = worker(stack, "/internal/task-claim", body)
    assert claimed["status"] == "Claimed"
    return {name: claimed[name] for name in ("task_id", "attempt", "lease_token")}


def worker(stack: DevStack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    handle = stack.handle
    answer = httpx.post(
        f"{handle.internal_url}{path}", json=body, headers={"X-Trace-Worker-Token": handle.worker_token}
    )
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def test_plan_and_deploy_agree_and_a_second_deploy_changes_nothing(
    stack: DevStack, dag: str, file: Path
) -> None:
    planned = told(stack, "plan", file)
    assert not planned["changes_nothing"]
    assert {job["kind"] for job in planned["jobs"]} == {"added"}
    assert "+ first: added" in said(stack, "plan", file)
    first = told(stack, "deploy", file)
    assert (first["created"], first["dag_version"]) == (True, 1)
    assert first["jobs"][1]["outputs"][0]["dataset"] == f"{dag}_firsts"
    assert said(stack, "plan", file) == f"DAG {dag}: nothing changes\n"
    assert said(stack, "deploy", file) == f"{dag} version 1: this file was deployed before, 3 jobs active\n"


def test_a_conversation_with_a_worker_is_followed_to_the_downstream_task(
    stack: DevStack, dag: str, file: Path
) -> None:
    task_id = deployed_task(stack, dag, file)
    assert "no worker of runtime ecs_python" in said(stack, "task", "show", task_id)
    fence = claim(stack, task_id)
    assert worker(stack, "/internal/heartbeat", fence)["cancel"] is False
    [running] = told(stack, "tasks", "--dag", dag, "--status", "running")["tasks"]
    assert (running["task_id"], running["worker_id"]) == (task_id, "worker-1")
    output = {"output_index": 0, "start": 0, "end": 99, "row_count": 0}
    worker(stack, "/internal/task-complete", {**fence, "status": "Completed", "outputs": [output]})

    [downstream] = told(stack, "tasks", "--dag", dag, "--job", "second", "--status", "Queued")["tasks"]
    listing = said(stack, "tasks", "--dag", dag).splitlines()
    columns = "TASK JOB SCOPE STATUS ATTEMPT WAITS FOR CREATED WORKER ERROR"
    assert listing[0].split() == columns.split()
    assert listing[1].startswith(f"{downstream['task_id']}  {dag}/second  0-99   Queued")
    shown = told(stack, "task", "show", task_id)
    assert [each["outcome"] for each in shown["attempts"]] == ["Completed"]
    assert "worker-1" in said(stack, "task", "show", task_id)
    status = told(stack, "status")
    [row] = [row for row in status["jobs"] if (row["dag_name"], row["job"]) == (dag, "second")]
    assert (row["state"], row["queued"], row["running"], row["failed"]) == ("active", 1, 0, 0)
    assert f"{dag}/second" in said(stack, "status")


def test_datasets_are_listed_and_shown_by_name(stack: DevStack, dag: str, file: Path) -> None:
    said(stack, "deploy", file)
    name = f"{dag}_firsts"
    listed = told(stack, "datasets", "--limit", "1000")["datasets"]
    assert name in [each["dataset"] for each in listed]
    assert name in said(stack, "datasets", "--limit", "1000")
    shown = told(stack, "datasets", "show", name)["dataset"]
    assert (shown["dag_name"], shown["job"], shown["storage"]) == (dag, "first", "none")
    assert f"producer    {dag}/first" in said(stack, "datasets", "show", name)
    unknown = stack.run("datasets", "show", "nothing_of_that_name")
    assert unknown.returncode == 1
    assert "nothing_of_that_name" in one_line(unknown)


def test_a_failed_task_is_shown_with_its_reason_and_can_be_retried_and_canceled(
    stack: DevStack, dag: str, file: Path
) -> None:
    task_id = deployed_task(stack, dag, file)
    escape = "\x1b[31mdisk on fire"
    failed = {"status": "Failed", "error_message": escape, "retryable": False}
    worker(stack, "/internal/task-complete", {**claim(stack, task_id), **failed})
    status = said(stack, "status")
    assert "disk on fire" in status
    assert "\x1b" not in status
    assert told(stack, "retry", task_id)["status"] == "Queued"
    assert said(stack, "cancel", task_id) == f"task {task_id} is Canceled\n"
    [task] = told(stack, "tasks", "--dag", dag, "--status", "Canceled")["tasks"]
    assert task["task_id"] == task_id
    unknown = stack.run("cancel", str(uuid4()))
    assert unknown.returncode == 1
    one_line(unknown)


def test_a_paused_job_says_so_until_it_is_resumed(stack: DevStack, dag: str, file: Path) -> None:
    said(stack, "deploy", file)

    def state() -> str:
        [row] = [
            row for row in told(stack, "status")["jobs"] if (row["dag_name"], row["job"]) == (dag, "first")
        ]
        return str(row["state"])

    assert said(stack, "pause", f"{dag}/first") == f"{dag}/first is paused\n"
    assert state() == "paused"
    assert told(stack, "resume", f"{dag}/first") == {"dag_name": dag, "job": "first", "paused": False}
    assert state() == "active"


def test_lists_are_pages(stack: DevStack, dag: str, file: Path) -> None:
    said(stack, "deploy", file)
    for start in (0, 10, 20):
        said(stack, "trigger", f"{dag}/src", "--start", str(start), "--end", str(start + 9))
    first = told(stack, "tasks", "--dag", dag, "--limit", "2")
    assert len(first["tasks"]) == 2
    rest = told(stack, "tasks", "--dag", dag, "--limit", "2", "--after", first["next"])
    assert (len(rest["tasks"]), rest["next"]) == (1, None)
    assert f"--after {first['next']}" in stack.run("tasks", "--dag", dag, "--limit", "2").stderr


def test_nothing_given_up_is_said_in_both_forms(stack: DevStack) -> None:
    assert said(stack, "outbox", "failed") == "nothing was given up\n"
    assert told(stack, "outbox", "failed") == {"failed": []}
    assert told(stack, "outbox", "replay") == {"replayed": 0}
    assert told(stack, "outbox", "replay", "1", "2") == {"replayed": 0}


@pytest.mark.parametrize("command", ["deploy", "plan"])
def test_a_broken_file_is_told_with_all_its_problems(stack: DevStack, tmp_path: Path, command: str) -> None:
    file = tmp_path / "broken dag.yaml"
    file.write_text(BROKEN)
    refused = stack.run(command, file)
    assert (refused.returncode, refused.stdout) == (2, "")
    lines = refused.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{file}:5:5", f"{file}:7:24", f"{file}:10:5"]
    assert [line.split(": ")[1] for line in lines] == [
        "jobs[0].runtime",
        "jobs[0].inputs[0].from.job",
        "jobs[0].colour",
    ]


def test_a_file_comes_from_standard_input_too(stack: DevStack) -> None:
    refused = stack.run("plan", "-", stdin="name: x\nworks: 1\n")
    assert refused.returncode == 2
    assert "<stdin>:2:1: works: " in refused.stderr


def test_what_is_no_yaml_at_all_has_the_same_exit_code(stack: DevStack, tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00")
    refused = stack.run("deploy", file)
    assert refused.returncode == 2
    assert one_line(refused).startswith(f"{file}: ")
    absent = stack.run("deploy", tmp_path / "absent.yaml")
    assert absent.returncode == 2
    assert one_line(absent) == f"error: {tmp_path / 'absent.yaml'}: No such file or directory"


def test_a_refused_trigger_is_one_line(stack: DevStack, dag: str, file: Path) -> None:
    said(stack, "deploy", file)
    refused = stack.run("trigger", f"{dag}/first", "--cursor", "1")
    assert refused.returncode == 1
    assert f"{dag}/first" in one_line(refused)
    assert stack.run("trigger", f"{dag}/src", "--cursor", "1", "--start", "0").returncode == 2
    assert stack.run("trigger", f"{dag}/src", "--start", "0").returncode == 2
    assert stack.run("trigger", dag, "--cursor", "1").returncode == 2
    behind = stack.run("trigger", f"{dag}/src", "--start", "9", "--end", "0")
    assert behind.returncode == 2
    assert "--start 9 is above --end 0" in behind.stderr
    nothing = stack.run("trigger", f"{dag}/src")
    assert nothing.returncode == 1
    assert (
        f"{dag}/src runs no code, so a trigger names blocks: --cursor, or --start and --end" in nothing.stderr
    )
    unknown = [stack.run("sources", command, f"{dag}/gone") for command in ("next", "run", "secret")]
    assert [each.returncode for each in unknown] == [1, 1, 1]
    assert [len(each.stderr.splitlines()) for each in unknown] == [1, 1, 1]


def test_the_stack_is_found_by_address_and_token(stack: DevStack) -> None:
    handle = stack.handle
    by_options = tracelake("tasks", "--json", "--url", handle.user_url, "--token", handle.user_token)
    assert by_options.returncode == 0, by_options.stderr
    by_environment = tracelake(
        "tasks", "--json", TRACELAKE_URL=handle.user_url, TRACELAKE_TOKEN=handle.user_token
    )
    assert by_environment.stdout == by_options.stdout
    assert tracelake("tasks", "--url", handle.user_url).returncode == 2
    stranger = tracelake("tasks", "--url", handle.user_url, "--token", "tlu_wrong")
    assert stranger.returncode == 1
    one_line(stranger)


def test_a_named_home_wins_over_the_environment(stack: DevStack) -> None:
    done = tracelake(
        "tasks", "--json", "--home", stack.home, TRACELAKE_URL="http://127.0.0.1:9", TRACELAKE_TOKEN="x"
    )
    assert done.returncode == 0, done.stderr


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(stack: DevStack) -> None:
    done = tracelake(
        "tasks", "--home", stack.home, HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9"
    )
    assert done.returncode == 0, done.stderr


COMMANDS = (("tasks",), ("status",))
"""As real processes; tests/unit/cli/test_cli_without_stack.py goes through all of them."""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_a_stack_every_command_says_how_to_start_one(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    home = tmp_path / "no home"
    done = tracelake(*command, "--home", home)
    assert done.returncode == 3
    assert f"tracelake dev --home '{home}'" in one_line(done)
    assert not home.exists()


def test_an_address_where_nobody_or_somebody_else_answers_is_not_a_stack(stack: DevStack) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        silent = tracelake("tasks", "--url", url, "--token", "x")
    assert silent.returncode == 3
    assert url in one_line(silent)
    assert tracelake("tasks", "--url", "not a url", "--token", "x").returncode == 2


def test_debug_shows_where_it_failed_and_nothing_else_does(tmp_path: Path) -> None:
    quiet = tracelake("tasks", "--home", tmp_path)
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in tracelake("--debug", "tasks", "--home", tmp_path).stderr
    assert "Traceback" in tracelake("tasks", "--home", tmp_path, "--debug").stderr


def test_doctor_finds_nothing_wrong_with_a_running_stack(stack: DevStack) -> None:
    findings = told(stack, "doctor")["findings"]
    verdicts = {each["check"]: each["verdict"] for each in findings}
    assert {"python", "embedded postgres", "home", "disk", "stack", "clock"} <= set(verdicts)
    assert set(verdicts.values()) - {"warning"} == {"ok"}
    assert f"stack: {stack.handle.user_url} is ready" in said(stack, "doctor")


def test_doctor_names_the_remedy_of_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = tracelake("doctor", "--home", tmp_path / "file" / "home")
    assert done.returncode == 1
    assert f"failed  home: {tmp_path / 'file'} is not a folder" in done.stdout
    assert "-> choose another with --home" in done.stdout


def test_keys_are_listed_and_rotated_with_overlap(stack: DevStack, tmp_path: Path) -> None:
    [active] = told(stack, "keys", "list")
    new = told(stack, "keys", "rotate")
    assert new["state"] == "next"
    assert [(key["kid"], key["state"]) for key in told(stack, "keys", "list")] == [
        (active["kid"], "active"),
        (new["kid"], "next"),
    ]
    assert new["kid"] in said(stack, "keys", "rotate")
    published = httpx.get(f"{stack.handle.internal_url}/internal/jwks/task").json()["keys"]
    assert {key["kid"] for key in published} == {active["kid"], new["kid"]}
    none = tracelake("keys", "list", "--home", tmp_path)
    assert none.returncode == 1
    one_line(none)


def test_the_schema_is_json(stack: DevStack) -> None:
    schema = json.loads(tracelake("schema").stdout)
    assert schema["title"] == "Tracelake DAG"
