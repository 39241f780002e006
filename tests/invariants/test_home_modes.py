"""A home is for its owner alone, whatever it was before, and so is every file with a secret in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from tracelake.cli.main import app
from tracelake.dev.handle import DispatcherFiles, DispatcherHandle, write_ready
from tracelake.dev.home import Home
from tracelake.dev.home_checks import take_over
from tracelake.domain.errors import Unavailable
from tracelake.tokens.signing import PemKeyring


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [0o755, 0o750, 0o777, 0o775, 0o701, 0o710, 0o700])
def test_an_existing_folder_is_closed(tmp_path: Path, before: int) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "rpc.toml").touch()
    folder.chmod(before)
    Home(folder)
    assert mode(folder) == 0o700


def test_a_new_home_is_closed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Home(tmp_path / "deep" / "home")
    finally:
        os.umask(before)
    assert mode(tmp_path / "deep" / "home") == 0o700


def test_a_folder_that_is_everybodys_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login, shared = tmp_path / "login", tmp_path / "shared"
    login.mkdir(mode=0o755)
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("HOME", str(login))
    root = mode(Path("/"))
    for folder in (login, shared, Path("/"), login / ".." / "shared"):
        with pytest.raises(Unavailable, match=r"choose a folder in it|can't write") as refused:
            Home(folder)
        assert refused.value.reason in ("HomeShared", "HomeUnusable")
    assert (mode(login), mode(shared), mode(Path("/"))) == (0o755, 0o1777, root)


def test_a_folder_of_somebody_else_that_cannot_be_closed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o775)

    def not_ours(self: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", not_ours)
    with pytest.raises(Unavailable, match="choose a folder of your own"):
        Home(folder)


@pytest.mark.parametrize("inner", [0o700, 0o755])
def test_a_home_that_belongs_to_somebody_else_is_refused_also_by_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: int
) -> None:
    folder = tmp_path / "home"
    folder.mkdir(mode=inner)
    owner = os.geteuid() + 1000
    if os.geteuid() == 0:
        os.chown(folder, owner, owner)
    else:
        # A user can't give a folder away, and isn't let into one like this; but they could be somebody else.
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        Unavailable, match=f"belongs to uid {owner}, .* choose a folder of your own"
    ) as refused:
        Home(folder)
    assert refused.value.reason == "HomeForeign"
    assert (mode(folder), list(folder.iterdir())) == (inner, [])


@pytest.fixture(scope="module")
def command() -> TyperGroup:
    made = get_command(app)
    assert isinstance(made, TyperGroup)
    return made


def umask_of(command: TyperGroup, name: str, given: int) -> int:
    """What the command works with, as far as it gets: it is asked for something that it doesn't know."""
    assert name in command.commands
    before = os.umask(given)
    try:
        with pytest.raises(Exception, match="No such option"):
            command.main([name, "--no-such-option"], standalone_mode=False)
    finally:
        kept = os.umask(before)
    return kept


@pytest.mark.parametrize(
    ("given", "kept"), [(0o000, 0o022), (0o002, 0o022), (0o022, 0o022), (0o027, 0o027), (0o077, 0o077)]
)
def test_a_service_makes_nothing_that_others_write_to(command: TyperGroup, given: int, kept: int) -> None:
    services = ("dev", "dispatcher", "worker", "sink", "delivery", "scheduler", "query-service", "devchain")
    assert {umask_of(command, service, given) for service in services} == {kept}


def test_what_a_person_makes_has_the_mode_that_they_want(command: TyperGroup) -> None:
    assert umask_of(command, "init", 0o002) == 0o002


def test_everything_that_is_kept_in_a_home_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    files = DispatcherFiles(tmp_path / "home")
    try:
        home = Home(tmp_path / "home")
        home.secrets(), home.query_secrets(), home.data_secrets(), home.reading_secrets()
        assert home.worker_tokens
        take_over(home)
        home.copies.preset({"queue_password": "given"})
        home.copies.disown_worker_tokens()
        PemKeyring(home.keys)
        write_ready(home.folder / "sink.pid")
        files.publish(DispatcherHandle("http://user", "http://internal", "token", "token", os.getpid()))
        with home.locked():
            pass
    finally:
        os.umask(before)
    assert exposed(home.folder) == []
    files.withdraw()


def exposed(home: Path) -> list[Path]:
    """What others could use, if the home itself didn't keep them out."""
    return [path for path in (home, *home.rglob("*")) if mode(path) & 0o077]
