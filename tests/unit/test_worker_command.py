"""``tracelake worker`` before it works: what it tells, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tracelake.testing.dev_stack import tracelake


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


def test_a_wrapper_cannot_be_looked_into() -> None:
    script = (
        "import ctypes; from tracelake.worker.host.kernel import forbid_inspection; "
        "forbid_inspection(); raise SystemExit(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
