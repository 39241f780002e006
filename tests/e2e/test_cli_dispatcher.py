"""``tracelake dispatcher`` by itself: commands find it by its home while it runs, and its log afterwards."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

from tests.support.dev_stack import PATIENCE, eventually, tracelake
from tracelake.dev.handle import DispatcherHandle
from tracelake.stack_connection import read_handle

COMMAND = (sys.executable, "-m", "tracelake")


def test_a_lone_dispatcher_is_found_by_its_home_for_as_long_as_it_runs(tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = home / "dispatcher.json"
    log = home / "logs" / "dispatcher.log"
    log.parent.mkdir(parents=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, "dispatcher", "--home", str(home), "--user-port", "0", "--internal-port", "0"],
            stdout=output,
            stderr=output,
        )
    try:
        handle = eventually("the dispatcher is ready", lambda: read_handle(file, DispatcherHandle))
        assert handle.pid == process.pid
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        status = tracelake("status", "--home", home, "--json")
        assert status.returncode == 0, status.stderr
        assert json.loads(status.stdout)["url"] == handle.user_url
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert not file.exists()
    assert tracelake("status", "--home", home).returncode == 3

    told = tracelake("logs", "--home", home)
    assert "dispatcher stopped" in told.stdout
    entries = [json.loads(line) for line in tracelake("logs", "--home", home, "--json").stdout.splitlines()]
    assert "dispatcher stopped" in [entry["event"] for entry in entries]
    assert tracelake("logs", "--home", home, "-n", "1").stdout.count("\n") == 1
    unknown = tracelake("logs", "nobody", "--home", home)
    assert unknown.returncode == 1
    assert "there are dispatcher, postgres-state" in unknown.stderr


def test_a_followed_log_goes_on_also_when_it_is_begun_anew(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "dispatcher.log"
    log.parent.mkdir()
    log.write_text("old\nlast\n")
    output = tmp_path / "output"
    with output.open("wb") as file:
        following = subprocess.Popen(
            [*COMMAND, "logs", "-f", "-n", "1", "--home", str(tmp_path)], stdout=file
        )
    try:
        eventually("the end is shown", lambda: output.read_text() == "last\n")
        with log.open("a") as more:
            more.write('{"event": "said", "level": "info", "task_id": "7"}\nhalf')
        eventually("what is added is shown", lambda: output.read_text() == "last\ninfo  said  task_id=7\n")
        log.write_text("anew\n")
        eventually("the new log is shown", lambda: output.read_text().endswith("task_id=7\nanew\n"))
    finally:
        following.send_signal(signal.SIGINT)
        assert following.wait(PATIENCE) == 130
