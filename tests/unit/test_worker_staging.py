"""Staging folders are made below the object root and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import pytest

from tracelake.contracts.dispatcher_api import PayloadOutput
from tracelake.domain.errors import TracelakeError
from tracelake.worker.staging import prepare_staging


def output(staging: str | None) -> PayloadOutput:
    return PayloadOutput(0, "rows", uuid4(), uuid4(), "parquet", 0, staging=staging)


def test_each_attempt_gets_its_folder_whatever_the_umask(tmp_path: Path) -> None:
    place = tmp_path / "objects" / "dataset" / "a" / "1-1"
    (tmp_path / "objects").mkdir()
    before = os.umask(0o077)
    try:
        for _ in range(2):
            prepare_staging(tmp_path / "objects", [output(f"file://{place}/"), output(None)], None)
    finally:
        os.umask(before)
    assert place.is_dir()
    assert place.stat().st_mode & 0o777 == 0o700
    assert place.parent.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("below", ["../outside/1-1/", "a/../../outside/", ""])
def test_a_place_outside_of_the_root_is_refused(tmp_path: Path, below: str) -> None:
    root = tmp_path / "objects"
    root.mkdir()
    with pytest.raises(TracelakeError):
        prepare_staging(root, [output(f"file://{root}/{below}")], None)
    assert sorted(tmp_path.iterdir()) == [root]


def test_a_neighbour_whose_name_begins_alike_is_outside(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    with pytest.raises(TracelakeError):
        prepare_staging(tmp_path / "objects", [output(f"file://{tmp_path}/objects2/a/")], None)


def test_a_link_on_the_way_is_refused(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "objects", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / "dataset").symlink_to(elsewhere)
    with pytest.raises(TracelakeError):
        prepare_staging(root, [output(f"file://{root}/dataset/a/")], None)
    assert not list(elsewhere.iterdir())


def test_other_kinds_of_storage_need_no_folder(tmp_path: Path) -> None:
    prepare_staging(tmp_path, [output("s3://bucket/a/"), output("postgres_table:staging_1")], None)
    assert not list(tmp_path.iterdir())
