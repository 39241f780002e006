"""Staging folders are made below the object root and nowhere else, and what is in them is taken over for good."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import pytest

from tracelake.contracts.dispatcher_api import OutputIn, PayloadOutput
from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.domain.errors import Conflict, Forbidden, Invalid, TracelakeError
from tracelake.worker import staging
from tracelake.worker.staging import prepare_staging, take_over, version_folders

HASH = "sha256:" + "0" * 64


def output(place: str | None) -> PayloadOutput:
    return PayloadOutput(0, "rows", uuid4(), uuid4(), "parquet", 0, staging=place)


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


def staged(root: Path, name: str = "part") -> Path:
    folder = root / "dataset" / "a" / "1-1"
    prepare_staging(root, [output(f"file://{folder}/")], None)
    path = folder / name
    path.write_text("rows")
    return path


def reporting(path: Path, location: str | None = None) -> list[OutputIn]:
    file = ManifestFile(location=location or f"file://{path}", rows=1, bytes=4, content_hash=HASH)
    return [OutputIn(0, manifest=Manifest(files=(file,), schema_hash=HASH))]


def test_what_is_taken_over_is_for_all_to_read_and_for_nobody_to_change(tmp_path: Path) -> None:
    path = staged(tmp_path)
    take_over(tmp_path, ["dataset/a/1-1"], reporting(path), [os.geteuid()])
    assert path.stat().st_mode & 0o777 == 0o444
    assert path.parent.stat().st_mode & 0o777 == 0o755
    assert path.read_text() == "rows"


def test_a_reported_file_that_is_open_for_writing_is_refused_one_that_is_not_reported_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_WRITER_SECONDS", 0.0)
    path, other = staged(tmp_path), staged(tmp_path, "other")
    with other.open("a"):
        take_over(tmp_path, ["dataset/a/1-1"], reporting(path), [os.geteuid()])
        with pytest.raises(Conflict, match="other is still open for writing"):
            take_over(tmp_path, ["dataset/a/1-1"], reporting(other), [os.geteuid()])


def test_a_file_is_looked_at_however_its_location_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Dispatcher takes a plain path as well as an address."""
    monkeypatch.setattr(staging, "_WRITER_SECONDS", 0.0)
    path = staged(tmp_path, "rows")
    with path.open("ab"), pytest.raises(Conflict, match="still open for writing"):
        take_over(tmp_path, ["dataset/a/1-1"], reporting(path, str(path)), [os.geteuid()])
    for elsewhere in (
        "rows.parquet",
        "s3://bucket/a/rows.parquet",
        f"file://{tmp_path}2/rows",
        "/etc/passwd",
    ):
        with pytest.raises(TracelakeError):
            take_over(tmp_path, ["dataset/a/1-1"], reporting(path, elsewhere), [os.geteuid()])


def test_where_there_are_no_leases_the_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = staged(tmp_path)
    monkeypatch.setattr(staging, "_is_open_for_writing", lambda _: None)
    with path.open("r+") as kept:
        take_over(tmp_path, ["dataset/a/1-1"], reporting(path), [os.geteuid()])
        kept.write("x")
    assert path.read_text() == "rows"
    assert [each.name for each in path.parent.iterdir()] == ["part"]
    assert path.stat().st_mode & 0o777 == 0o444


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        # Only root can give files away.
        return
    path = staged(tmp_path)
    os.chown(path, 12345, -1)
    with pytest.raises(Forbidden, match="uid 12345"):
        take_over(tmp_path, ["dataset/a/1-1"], reporting(path), [54321])


def test_a_folder_full_of_files_does_not_keep_the_worker_busy_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_MAX_ENTRIES", 3)
    for number in range(4):
        path = staged(tmp_path, f"part-{number}")
    with pytest.raises(Invalid, match="more than 3"):
        take_over(tmp_path, ["dataset/a/1-1"], reporting(path), [os.geteuid()])


def test_the_folders_of_committed_files_are_those_of_their_versions(tmp_path: Path) -> None:
    root = f"file://{os.path.realpath(tmp_path)}"
    version = f"dataset/{uuid4()}/version/{uuid4()}"
    locations = [f"{root}/{version}/t/1-1/w-1/a_0_9.parquet", f"{root}/{version}/u/1-1/b.parquet"]
    assert version_folders(tmp_path, [*locations, "s3://bucket/a", "file:///etc/passwd"]) == [version]
