"""No way out: a hostile program in the sandbox reaches nothing of the host, and takes no more of it than it may.

Each attempt is made from a worker that is root and from one that has no rights at all.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.sandbox_driver import BAIT, LAUNCHERS, PYTHON, Outcome, Run, run_in_sandboxes

HOSTILE = {path.name: path.read_text() for path in Path(__file__).with_name("hostile").glob("*.py")}
MIB = 1024 * 1024

# The names are read from the program, since it can be executed only inside.
_SOURCE = HOSTILE["escapes.py"]
NAMESPACES = ("mount", "cgroup", "uts", "ipc", "user", "pid", "net", "time")
PLACES = ("root", "code", "runtime", "usr", "etc", "own_passwd", "dev", "proc_sys", "core_pattern", "sysrq")
ESCAPES = (
    *re.findall(r"@attempt\ndef (\w+)", _SOURCE),
    *(f"unshare_{name}_namespace" for name in NAMESPACES),
    *(f"write_{name}" for name in PLACES),
)

# What is taken, with which limits, and after how many seconds the worker has enough of it.
GREED: dict[str, tuple[dict[str, int | float | None], float]] = {
    "fork_bomb": ({"processes": 20}, 1.5),
    "threads": ({"processes": 20}, 60),
    "memory": ({"memory_bytes": 64 * MIB}, 60),
    "memory_of_many": ({"memory_bytes": 64 * MIB}, 5),
    "shared_memory": ({"memory_bytes": 64 * MIB}, 60),
    "memory_files": ({"memory_bytes": 64 * MIB}, 60),
    "endless_loop": ({}, 1),
    "cpu_time": ({"cpu_seconds": 1}, 60),
    "fill_tmp": ({"tmp_bytes": 8 * MIB}, 60),
    "fill_shared_memory_folder": ({"tmp_bytes": 8 * MIB}, 60),
    "large_file": ({"file_bytes": 2 * MIB}, 60),
    "descriptors": ({"open_files": 100}, 60),
    "child_left_behind": ({}, 60),
    "talk": ({}, 1),
}

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.parametrize("launcher", LAUNCHERS),
]


def _python(program: str, *arguments: str) -> list[str]:
    return [PYTHON, "-I", "-S", "-B", f"/var/task/{program}", *arguments]


@cache
def escapes(launcher: str) -> dict[str, str]:
    (outcome,) = run_in_sandboxes(launcher, [Run(argv=_python("escapes.py", BAIT), code=HOSTILE)])
    assert (outcome.returncode, outcome.left) == (0, 0), outcome.output
    found: dict[str, str] = json.loads(outcome.output)
    return found


@cache
def greed(launcher: str) -> dict[str, Outcome]:
    """One worker for all of them: that it gets through the list shows that it wasn't harmed."""
    runs = [
        Run(argv=_python("greed.py", name), code=HOSTILE, limits=limits, seconds=seconds)
        for name, (limits, seconds) in GREED.items()
    ]
    return dict(zip(GREED, run_in_sandboxes(launcher, runs), strict=True))


@pytest.mark.parametrize("name", ESCAPES)
def test_every_way_out_is_closed(launcher: str, name: str) -> None:
    assert escapes(launcher)[name].startswith("refused: ")


def test_the_list_of_escapes_is_complete(launcher: str) -> None:
    assert sorted(escapes(launcher)) == sorted(ESCAPES)


@pytest.mark.parametrize("name", GREED)
def test_nothing_of_a_greedy_program_is_left(launcher: str, name: str) -> None:
    assert greed(launcher)[name].left == 0


def test_a_fork_bomb_stays_within_its_processes(launcher: str) -> None:
    outcome = greed(launcher)["fork_bomb"]
    assert outcome.reason == "killed"
    # bubblewrap and its reaper show the program's arguments as well
    assert 1 < outcome.most <= 20 + 3


def test_threads_count_as_processes(launcher: str) -> None:
    outcome = greed(launcher)["threads"]
    assert outcome.returncode == 0
    assert 0 < int(outcome.output) <= 20 + 3


@pytest.mark.parametrize("name", ["memory", "memory_of_many", "shared_memory", "memory_files"])
def test_a_memory_hog_is_stopped(launcher: str, name: str) -> None:
    """By the kernel if there is a cgroup for it; otherwise its requests for more are refused."""
    outcome = greed(launcher)[name]
    refused = any(word in outcome.output for word in ("MemoryError", "PermissionError", "File too large"))
    assert outcome.reason == "out of memory" or (
        outcome.reason == "exited" and outcome.returncode and refused
    )


def test_an_endless_loop_is_killed(launcher: str) -> None:
    assert greed(launcher)["endless_loop"].reason == "killed"


def test_cpu_time_that_is_used_up_ends_the_program(launcher: str) -> None:
    assert greed(launcher)["cpu_time"].reason == "out of CPU time"


@pytest.mark.parametrize("name", ["fill_tmp", "fill_shared_memory_folder"])
def test_temporary_folders_have_a_quota(launcher: str, name: str) -> None:
    written, reason = greed(launcher)[name].output.split(" ", 1)
    assert int(written) <= 8 * MIB
    assert reason == "No space left on device\n"


def test_a_file_has_a_largest_size(launcher: str) -> None:
    assert greed(launcher)["large_file"].output == f"{2 * MIB} File too large\n"


def test_descriptors_are_limited(launcher: str) -> None:
    held, reason = greed(launcher)["descriptors"].output.split(" ", 1)
    assert int(held) < 100
    assert reason == "Too many open files\n"


def test_a_child_that_was_left_behind_ends_with_the_program(launcher: str) -> None:
    outcome = greed(launcher)["child_left_behind"]
    assert (outcome.reason, outcome.returncode) == ("exited", 0)


def test_a_program_that_never_stops_talking_is_killed(launcher: str) -> None:
    assert greed(launcher)["talk"].reason == "killed"
