"""The README's first command, as a user runs it."""

import subprocess
import sys

import pytest

# Not beside the other one that takes the whole machine.
pytestmark = pytest.mark.xdist_group("whole_stack")


def test_the_demo_ends_with_every_chunk_exactly_once() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tracelake.dev.demo"], capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "killed dispatcher" in run.stdout
    assert "✗" not in run.stdout
