"""``tracelake worker`` before it works: what it tells, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.dev_stack import tracelake
from tracelake.dev.handle import DevHandle, write_handle
from tracelake.stack_connection import DEV_FILE


def test_help_shows_examples_and_where_the_stack_is_read_from() -> None:
    told = tracelake("worker", "--help").stdout
    for part in (
        "tracelake worker --runtime ecs_python",
        "TRACELAKE_WORKER_TOKEN",
        "--idle-timeout",
        "--operators",
    ):
        assert part in told


def test_without_a_stack_it_says_what_is_missing(tmp_path: Path) -> None:
    refused = tracelake(
        "worker", "--runtime", "ecs_python", "--home", tmp_path, TRACELAKE_INTERNAL_URL="http://127.0.0.1:1"
    )
    assert refused.returncode == 3
    assert "TRACELAKE_WORKER_TOKEN, TRACELAKE_QUEUE_DSN" in refused.stderr
    assert "TRACELAKE_INTERNAL_URL" not in refused.stderr


def test_the_runtime_that_the_dispatcher_runs_itself_is_refused(tmp_path: Path) -> None:
    refused = tracelake("worker", "--runtime", "dispatcher", "--home", tmp_path)
    assert refused.returncode == 1
    assert "the Dispatcher itself" in refused.stderr


def test_one_started_by_hand_loads_the_operators_of_the_stacks_own_workers(tmp_path: Path) -> None:
    nowhere = dict.fromkeys(
        ("state_dsn", "data_owner_dsn", "queue_dsn", "data_write_dsn", "data_read_dsn"),
        "postgresql://127.0.0.1:1/x",
    )
    handle = DevHandle(
        user_url="http://127.0.0.1:1",
        internal_url="http://127.0.0.1:1",
        query_url="http://127.0.0.1:1",
        worker_token="token",
        user_token="token",
        object_root=str(tmp_path / "objects"),
        operators=("no_such_module_of_the_stack",),
        pids={},
        **nowhere,
    )
    write_handle(tmp_path / DEV_FILE, handle)
    Path(handle.object_root).mkdir()
    refused = tracelake("worker", "--runtime", "ecs_python", "--home", tmp_path)
    assert refused.returncode == 1
    assert "no_such_module_of_the_stack" in refused.stderr


def test_a_wrapper_cannot_be_looked_into() -> None:
    script = (
        "import ctypes; from tracelake.kernel import forbid_inspection; "
        "forbid_inspection(); raise SystemExit(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
