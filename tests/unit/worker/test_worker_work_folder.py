"""A worker's folder goes with it, and what a killed one left goes with the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracelake.cli.worker import work_folder
from tracelake.worker.app import own_work_folder


def test_the_folder_lives_as_long_as_its_worker(tmp_path: Path) -> None:
    with own_work_folder(tmp_path / "work" / "one"):
        (tmp_path / "work" / "one" / "spark").mkdir()
        with own_work_folder(tmp_path / "work" / "two"):
            assert (tmp_path / "work" / "one" / "spark").is_dir()
    assert not list((tmp_path / "work").iterdir())


def test_a_folder_that_a_killed_worker_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "left" / "deep").mkdir(parents=True)
    (tmp_path / "kept").touch()
    with own_work_folder(tmp_path / "own"):
        assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "own"]


@pytest.mark.parametrize("name", ["..", ".", "../..", "a/../../b", "/etc", "..\0", "a b", "..."])
def test_no_name_of_a_worker_or_a_runtime_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    for folder in (work_folder(tmp_path, "ecs_python", name), work_folder(tmp_path, name, "one")):
        assert folder.resolve().parent.parent == tmp_path / "work"
