"""Homes that can't be used are refused in one line that says what to do; those of older programs are taken over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tracelake import __version__
from tracelake.dev import home_checks
from tracelake.dev.home import Home
from tracelake.dev.home_checks import check_space, take_over
from tracelake.domain.errors import Conflict, Invalid, Unavailable


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "a höme ✓")


def test_a_new_home_and_one_from_before_versions_were_kept_are_marked(home: Home) -> None:
    take_over(home)
    assert (home.folder / "VERSION").read_text() == f"{__version__}\n"


def test_a_home_of_an_older_program_is_taken_over(home: Home) -> None:
    take_over(home, "0.3.7")
    take_over(home, "0.10.0")
    assert (home.folder / "VERSION").read_text() == "0.10.0\n"


def test_a_home_of_a_newer_program_is_refused_and_stays_as_it_is(home: Home) -> None:
    take_over(home, "1.2.0")
    with pytest.raises(Conflict, match=r"was used by Tracelake 1\.2\.0, and this is 1\.1\.9: upgrade"):
        take_over(home, "1.1.9")
    assert (home.folder / "VERSION").read_text() == "1.2.0\n"


def test_programs_that_differ_in_the_third_number_share_a_home(home: Home) -> None:
    take_over(home, "1.2.5")
    take_over(home, "1.2.4")
    assert (home.folder / "VERSION").read_text() == "1.2.5\n"


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\xff\xfe", b"1\n", b"1.2.3; rm\n"])
def test_a_mark_that_is_none_is_refused(home: Home, content: bytes) -> None:
    (home.folder / "VERSION").write_bytes(content)
    with pytest.raises(Invalid, match="doesn't name a version"):
        take_over(home)


def test_a_file_in_the_homes_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="it is a file; choose another with --home"):
        Home(tmp_path / "file")


def test_who_runs_a_stack_on_a_home_is_named(home: Home) -> None:
    with home.locked(), pytest.raises(Conflict, match=rf"already \(process {os.getpid()}\)"), home.locked():
        pass
    with home.locked():
        pass


def test_a_disk_that_is_almost_full_is_refused_before_anything_is_made(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_checks, "NEW_HOME_BYTES", 2**60)
    with pytest.raises(Unavailable, match=r"MiB are free on the disk of .* free some space"):
        check_space(home)
    home.state_cluster.mkdir(parents=True)
    check_space(home)
