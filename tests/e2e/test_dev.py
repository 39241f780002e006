"""``tracelake dev``: one command brings everything up, keeps it up, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest

from tests.support.dev_stack import DevStack, descendants, eventually, is_gone, tracelake
from tracelake.dev.handle import DevHandle
from tracelake.stack_connection import DEV_FILE, read_handle

CONTRACT_FIELDS = {
    "user_url",
    "internal_url",
    "query_url",
    "worker_token",
    "user_token",
    "state_dsn",
    "data_dsn",
    "object_root",
    "pids",
}
STOP_SECONDS = 10
PARTS = {"delivery", "dispatcher", "postgres-state", "postgres-data", "query", "scheduler", "sink"}
DAG = """
name: kept
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

Start = Callable[..., DevStack]


@pytest.fixture
def tmp_path(path_in_memory: Path) -> Path:
    """Each of these homes gets two new databases."""
    return path_in_memory


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[DevStack] = []

    def start(home: Path, *options: str) -> DevStack:
        stack = DevStack(home, tmp_path / f"output-{len(started)}", *options)
        started.append(stack)
        return stack

    yield start
    for stack in started:
        stack.close()


def ready_on(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def processes(stack: DevStack) -> list[int]:
    return [stack.pid, *descendants(stack.pid)]


def listening(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", urlsplit(url).port)) == 0


def test_an_empty_private_home_with_spaces_gets_everything_and_a_sigterm_takes_it_away(
    tmp_path: Path, start: Start
) -> None:
    home = tmp_path / "a höme with spaces ✓"
    home.mkdir(mode=0o700)
    stack = start(home)
    handle = stack.until_ready()
    assert stack.stdout.read_text() == "ready\n"
    file = home / "dev.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert set(json.loads(file.read_text())) >= CONTRACT_FIELDS
    assert Path(handle.object_root).is_relative_to(home)
    assert set(handle.pids) == {"supervisor", *PARTS}
    for url in (handle.user_url, handle.internal_url, handle.query_url):
        assert ready_on(url)
    said = stack.stderr.read_text()
    for part in PARTS:
        assert f"tracelake dev: {part} is ready after" in said
    assert f"logs in {home / 'logs'}" in said
    for dsn, database in (
        (handle.state_dsn, "tracelake_state"),
        (handle.data_owner_dsn, "tracelake_data"),
        (handle.queue_dsn, "tracelake_queue"),
    ):
        with psycopg.connect(dsn) as connection:
            assert connection.info.dbname == database
    assert urlsplit(handle.queue_dsn).username == "tracelake_queue"

    everything = processes(stack)
    assert set(handle.pids.values()) <= set(everything)
    stack.send(signal.SIGTERM)
    assert stack.wait(STOP_SECONDS) == 0
    assert [pid for pid in everything if not is_gone(pid)] == []
    assert not file.exists()
    assert not listening(handle.user_url)


def test_signals_to_the_whole_group_and_twice_still_end_in_order(tmp_path: Path, start: Start) -> None:
    stack = start(tmp_path / "home")
    stack.until_ready()
    everything = processes(stack)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        stack.send(number, to_group=True)
    assert stack.wait() == 0
    assert [pid for pid in everything if not is_gone(pid)] == []
    assert "shutdown" in (stack.home / "postgres" / "state" / "server.log").read_text()


def test_a_stop_during_the_start_leaves_nothing(tmp_path: Path, start: Start) -> None:
    stack = start(tmp_path / "home")
    log = stack.home / "logs" / "dispatcher.log"
    eventually("the dispatcher is being started", log.exists)
    everything = processes(stack)
    stack.send(signal.SIGTERM)
    assert stack.wait() == 0
    assert [pid for pid in everything if not is_gone(pid)] == []
    assert "ready" not in stack.stdout.read_text()


def test_a_part_that_hangs_does_not_hold_up_the_stop(tmp_path: Path, start: Start) -> None:
    stack = start(tmp_path / "home")
    handle = stack.until_ready()
    everything = processes(stack)
    os.kill(handle.pids["dispatcher"], signal.SIGSTOP)
    stack.send(signal.SIGTERM)
    assert stack.wait(STOP_SECONDS) == 0
    assert [pid for pid in everything if not is_gone(pid)] == []


def test_killed_parts_are_back_on_the_same_ports_and_it_is_said(tmp_path: Path, start: Start) -> None:
    stack = start(tmp_path / "home")
    before = stack.until_ready()
    killed = ("dispatcher", "query", "scheduler", "sink")
    for part in killed:
        os.kill(before.pids[part], signal.SIGKILL)

    def back() -> DevHandle | None:
        now = stack.find_handle()
        changed = now is not None and all(
            now.pids.get(part) not in (None, before.pids[part]) for part in killed
        )
        return now if changed else None

    after = eventually("the killed parts have other pids", back)
    urls = (before.user_url, before.internal_url, before.query_url)
    assert (after.user_url, after.internal_url, after.query_url) == urls
    for part in killed:
        eventually(f"{part} is said to run again", lambda part=part: f"{part} runs again" in stack.output())
        assert f"{part} was killed by SIGKILL; starting it again in 0.25 s" in stack.output()
    assert all(map(ready_on, urls))
    assert stack.run("status").returncode == 0


def test_a_killed_postgres_is_back_on_the_same_port(tmp_path: Path, start: Start) -> None:
    stack = start(tmp_path / "home")
    before = stack.until_ready()
    os.kill(before.pids["postgres-state"], signal.SIGKILL)

    def back() -> DevHandle | None:
        now = stack.find_handle()
        changed = now is not None and now.pids.get("postgres-state") not in (
            None,
            before.pids["postgres-state"],
        )
        return now if changed else None

    after = eventually("the state database has another pid", back)
    assert after.state_dsn == before.state_dsn
    eventually("the dispatcher has its database again", lambda: ready_on(after.user_url))


def test_nothing_outlives_a_killed_supervisor_and_the_next_start_goes_on(
    tmp_path: Path, start: Start
) -> None:
    dag = tmp_path / "kept.yaml"
    dag.write_text(DAG)
    first = start(tmp_path / "home")
    handle = first.until_ready()
    assert first.run("deploy", dag).returncode == 0
    assert first.run("trigger", "kept/src", "--start", "0", "--end", "9").returncode == 0
    before = first.run("tasks", "--json").stdout
    assert '"kept"' in before
    everything = processes(first)
    first.send(signal.SIGKILL)
    first.wait()
    for pid in everything:
        eventually(f"process {pid} is gone", lambda pid=pid: is_gone(pid))
    assert not listening(handle.user_url)
    lost = first.run("tasks")
    assert lost.returncode == 3
    assert len(lost.stderr.splitlines()) == 1

    second = start(tmp_path / "home")
    again = second.until_ready()
    assert second.run("tasks", "--json").stdout == before
    assert (again.user_token, again.worker_token) == (handle.user_token, handle.worker_token)


def test_nothing_in_a_home_is_open_to_others_while_a_stack_runs(stack: DevStack) -> None:
    """The home's own mode keeps everybody out; objects are shown to operators by their own modes."""
    shown = [stack.home / name for name in ("objects", "work")]
    exposed = []
    for path in (stack.home, *stack.home.rglob("*")):
        if any(path.is_relative_to(each) for each in shown):
            continue
        with suppress(FileNotFoundError):
            found = path.lstat()
            if not stat.S_ISLNK(found.st_mode) and found.st_mode & 0o077:
                exposed.append(path)
    assert exposed == []


def test_every_part_is_monitored_at_the_address_that_is_listed(stack: DevStack) -> None:
    handle = read_handle(stack.home / DEV_FILE, DevHandle)
    assert handle is not None
    assert set(handle.metrics) == PARTS - {"postgres-state", "postgres-data"}
    for part, url in handle.metrics.items():
        page = httpx.get(url).text
        assert f'tracelake_process_info{{part="{part}"' in page
        for secret in (handle.worker_token, handle.user_token, "postgresql:"):
            assert secret not in page
        if part != "dispatcher":
            refused = [
                httpx.get(url.removesuffix("/metrics") + path) for path in ("/", "/v1/tasks", "/readyz")
            ]
            assert [each.status_code for each in refused] == [404] * 3
    # Workers register within seconds, and the Dispatcher looks every few.
    sinks = 'tracelake_workers{runtime="sink"} 1.0'
    assert eventually("the sink is counted", lambda: sinks in httpx.get(handle.metrics["dispatcher"]).text)
    targets = json.loads((stack.home / "prometheus-targets.json").read_text())
    listed = {each["labels"]["part"]: f"http://{each['targets'][0]}/metrics" for each in targets}
    shown = json.loads(stack.run("status", "--json").stdout)["metrics"]
    assert handle.metrics == listed == shown


def test_a_home_has_one_stack_at_a_time(stack: DevStack) -> None:
    refused = stack.run("dev", "--port", "auto")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert f"a stack runs on {stack.home} already (process {stack.handle.pids['supervisor']})" in line
    assert stack.run("status").returncode == 0


def test_a_taken_port_is_named_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = tracelake(
            "dev", "--home", tmp_path / "home", "--user-port", str(port), "--internal-port", "0"
        )
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert f"127.0.0.1:{port}" in line
    assert "--user-port (0 for any free one)" in line
    assert not (tmp_path / "home" / "postgres").exists()


def test_a_home_of_a_newer_version_is_refused_with_the_reason(tmp_path: Path, start: Start) -> None:
    """By its mark before anything runs, and by its databases when the mark is gone."""
    stack = start(tmp_path / "home")
    handle = stack.until_ready()
    with psycopg.connect(handle.state_dsn) as connection:
        connection.execute(
            "INSERT INTO schema_migration (version, name, sha256) VALUES (9999, '9999_later.sql', 'x')"
        )
    stack.send(signal.SIGTERM)
    stack.wait()
    mark = stack.home / "VERSION"
    mark.write_text("999.0.0\n")
    refused = stack.run("dev", "--port", "auto", "--no-workers")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert "was used by Tracelake 999.0.0" in line
    mark.unlink()
    refused = stack.run("dev", "--port", "auto", "--no-workers")
    assert refused.returncode == 1
    line = refused.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert "9999_later.sql" in line
    assert "upgrade" in line


def test_a_home_that_can_not_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = tracelake("dev", "--home", tmp_path / "file" / "home")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert str(tmp_path / "file" / "home") in line


def test_a_user_without_power_can_run_one_too(tmp_path: Path) -> None:
    home, output = tmp_path / "home", tmp_path / "output"
    command = [
        sys.executable,
        "-m",
        "tracelake",
        "dev",
        "--home",
        str(home),
        "--port",
        "auto",
        "--no-workers",
    ]
    with (
        output.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.unprivileged", str(tmp_path), *command], stdout=out
        ) as stack,
    ):
        try:
            eventually("it is ready", lambda: output.read_text() == "ready\n" or stack.poll() is not None)
            handle = read_handle(home / DEV_FILE, DevHandle)
            assert handle is not None
            assert all(map(ready_on, (handle.user_url, handle.internal_url, handle.query_url)))
            everything = [stack.pid, *descendants(stack.pid)]
        finally:
            stack.terminate()
            assert stack.wait(STOP_SECONDS) == 0
    assert [pid for pid in everything if not is_gone(pid)] == []


def test_the_doctor_looks_at_every_part(stack: DevStack) -> None:
    said = stack.run("doctor")
    assert f"parts: {', '.join(sorted({'supervisor', *PARTS}))} run" in said.stdout
    assert f"query service: {stack.handle.query_url} is ready" in said.stdout
    assert "query slots: " in said.stdout
    assert "home: was used by Tracelake " in said.stdout
