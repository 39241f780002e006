"""Small files are written whole, for their owner alone, and nothing else is left behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tracelake import durable_files
from tracelake.durable_files import create_private, replace_private


def test_a_file_is_replaced_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("open to all")
    path.chmod(0o644)
    replace_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "secret"
    elsewhere.write_bytes(b"somebody's")
    path.symlink_to(elsewhere)
    replace_private(path, b"new")
    assert elsewhere.read_bytes() == b"somebody's"
    assert not path.is_symlink()
    assert not create_private(path, b"third")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("write", [replace_private, create_private])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    path = tmp_path / "secret"
    path.write_bytes(b"old")
    monkeypatch.setattr(durable_files.os, "fsync", full)
    assert callable(write)
    with pytest.raises(OSError, match="No space"):
        write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_gives_it_to_an_account(tmp_path: Path) -> None:
    replace_private(tmp_path / "conf", b"", owner=(60600, 60600))
    assert (tmp_path / "conf").stat().st_uid == 60600
