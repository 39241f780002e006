"""Cgroups of both versions get the right values in the right files; folders stand for what isn't mounted here."""

from __future__ import annotations

import os
from pathlib import Path

from tracelake.sandbox.layout import SandboxLimits
from tracelake.sandbox.limits import Cgroup, CgroupParent, describe_limits, find_parent, rlimits

LIMITS = SandboxLimits(memory_bytes=1000, processes=5, cpu_share=0.5)


def _files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_version_2_limits_are_written_to_one_folder(tmp_path: Path) -> None:
    for optional in ("memory.swap.max", "memory.oom.group"):
        (tmp_path / optional).touch()
    Cgroup(2, {"memory": tmp_path, "pids": tmp_path, "cpu": tmp_path}).limit(LIMITS)
    assert _files(tmp_path) == {
        "memory.max": "1000",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "8",
        "cpu.max": "50000 100000",
    }


def test_version_1_limits_are_written_to_a_folder_for_each_controller(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("memory", "pids", "cpu")}
    for folder in folders.values():
        folder.mkdir()
    Cgroup(1, folders).limit(LIMITS)
    assert _files(folders["memory"]) == {"memory.limit_in_bytes": "1000"}
    assert _files(folders["pids"]) == {"pids.max": "8"}
    assert _files(folders["cpu"]) == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}


def test_a_kill_for_memory_is_told_by_either_version(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    assert Cgroup(2, {"memory": tmp_path}).out_of_memory()
    assert not Cgroup(1, {"memory": tmp_path}).out_of_memory()


def test_groups_of_workers_that_are_gone_are_swept_and_others_kept(tmp_path: Path) -> None:
    (tmp_path / "tracelake-sandbox-4194999-1").mkdir()
    (tmp_path / f"tracelake-sandbox-{os.getpid()}-1").mkdir()
    CgroupParent(2, {"memory": tmp_path}).sweep()
    assert [path.name for path in tmp_path.iterdir()] == [f"tracelake-sandbox-{os.getpid()}-1"]


def test_a_machine_without_usable_cgroups_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(f"30 1 0:1 / {tmp_path} ro - cgroup2 cgroup2 ro\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    assert find_parent(tmp_path) is None
    assert find_parent(tmp_path / "nothing") is None
    assert describe_limits(None).startswith("rlimits only")


def test_without_a_cgroup_memory_is_limited_for_each_process() -> None:
    assert ("RLIMIT_DATA", 1000, 1000) in rlimits(LIMITS, memory_is_counted=False)
    assert "RLIMIT_DATA" not in [name for name, _, _ in rlimits(LIMITS, memory_is_counted=True)]
