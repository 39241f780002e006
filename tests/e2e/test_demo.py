"""The README's first command, as a user runs it, on a shorter chain."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Not beside the other one that takes the whole machine.
pytestmark = pytest.mark.xdist_group("whole_stack")

README = Path(__file__).parents[2] / "README.md"


def test_the_demo_holds_and_the_readme_shows_what_it_prints() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--blocks", "1200"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "killed dispatcher" in run.stdout
    assert "✗" not in run.stdout
    checks = re.findall(r"^  (\w[\w ]*?) {2,}.* ✓ ", run.stdout, re.MULTILINE)
    assert len(checks) >= 8
    assert [label for label in checks if f"  {label} " not in README.read_text()] == []
