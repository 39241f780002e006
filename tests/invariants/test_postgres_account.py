"""Each embedded Postgres that root starts has a uid of its own: no other program gets at its data."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.embedded.postgres import Cluster, account
from tracelake.embedded.postgres.account import USER_VARIABLE
from tracelake.sandbox import accounts

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts Postgres as somebody else")
NOBODY = 65_534

# Prints what a process of another account could open of the server with the pid that it is told.
INTRUDER = """
import os, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
base = f"/proc/{sys.argv[1]}"
def attempt(what, act):
    try:
        act()
    except OSError:
        return
    print(what)
for name in ("pg_hba.conf", "postgresql.conf", "PG_VERSION", "base", "global"):
    attempt("read cwd/" + name, lambda: os.open(f"{base}/cwd/{name}", os.O_RDONLY))
    attempt("write cwd/" + name, lambda: os.open(f"{base}/cwd/{name}", os.O_RDWR))
attempt("create", lambda: os.open(f"{base}/cwd/left", os.O_WRONLY | os.O_CREAT, 0o600))
attempt("list cwd", lambda: os.listdir(f"{base}/cwd/"))
attempt("list root", lambda: os.listdir(os.path.join(base, "root", ".")))
attempt("environ", lambda: open(f"{base}/environ", "rb").read())
attempt("fd", lambda: os.listdir(f"{base}/fd"))
attempt("mem", lambda: open(f"{base}/mem", "rb"))
attempt("maps", lambda: open(f"{base}/maps", "rb").read())
attempt("signal", lambda: os.kill(int(sys.argv[1]), 0))
for path in sys.argv[3:]:
    attempt("path " + path, lambda: os.listdir(path))
"""


def uid_of(cluster: Cluster) -> int:
    assert cluster.pid is not None
    status = Path(f"/proc/{cluster.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1])


def found_by(uid: int, cluster: Cluster, *paths: Path) -> list[str]:
    command = [sys.executable, "-c", INTRUDER, str(cluster.pid), str(uid), *map(str, paths)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return said.stdout.splitlines()


def everything_in(folder: Path) -> list[tuple[Path, os.stat_result]]:
    return [(path, path.lstat()) for path in (folder, *folder.rglob("*"))]


def value(cluster: Cluster) -> object:
    with psycopg.connect(cluster.dsn()) as connection:
        row = connection.execute("SELECT n FROM kept").fetchone()
        assert row is not None
        return row[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster, Path]]:
    folder = tmp_path_factory.mktemp("pair")
    with Cluster(folder / "state", name="state") as state, Cluster(folder / "data", name="data") as data:
        yield state, data, folder


@as_root
def test_two_clusters_have_two_accounts_which_nothing_else_on_the_machine_has(
    pair: tuple[Cluster, Cluster, Path],
) -> None:
    uids = {uid_of(cluster) for cluster in pair[:2]}
    assert len(uids) == 2
    assert all(accounts.is_ours(uid) for uid in uids)
    known = {entry.pw_uid for entry in pwd.getpwall()}
    assert not uids & known


@as_root
@pytest.mark.parametrize("who", ["nobody", "daemon", "the other cluster"])
def test_no_other_account_reaches_a_cluster_through_its_processes(
    pair: tuple[Cluster, Cluster, Path], who: str
) -> None:
    state, data, folder = pair
    uid = uid_of(data) if who == "the other cluster" else pwd.getpwnam(who).pw_uid
    assert found_by(uid, state, folder / "state", folder / "state" / "pgdata") == []


@as_root
def test_the_intruder_finds_a_process_of_its_own_account(pair: tuple[Cluster, Cluster, Path]) -> None:
    """What the other tests rely on: the attempts do find what isn't kept apart."""
    assert {"write cwd/pg_hba.conf", "environ", "list cwd"} <= set(found_by(uid_of(pair[0]), pair[0]))


def test_data_and_passwords_are_for_their_owner_alone(pair: tuple[Cluster, Cluster, Path]) -> None:
    state, _, folder = pair
    for path, found in everything_in(folder / "state"):
        inside = path.is_relative_to(folder / "state" / "pgdata")
        assert found.st_uid == (uid_of(state) if inside else os.geteuid()), path
        assert not found.st_mode & 0o077, path


def test_nothing_of_ours_is_in_the_servers_environment_or_command_line(
    pair: tuple[Cluster, Cluster, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = pair[0]
    environ = Path(f"/proc/{state.pid}/environ").read_bytes().split(b"\0")
    assert {entry.partition(b"=")[0] for entry in environ if entry} <= {b"PATH", b"LC_ALL", b"TZ"}
    command = Path(f"/proc/{state.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert command[1:] == [b"-D", b"/proc/self/cwd"]


@as_root
def test_data_of_nobody_gets_an_account_of_its_own_at_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    made_by_nobody(folder)
    with Cluster(folder, name="state") as cluster:
        uid = uid_of(cluster)
        assert accounts.is_ours(uid)
        assert value(cluster) == 7
        assert {found.st_uid for _, found in everything_in(folder / "pgdata")} == {uid}
    with Cluster(folder, name="state") as cluster:
        assert uid_of(cluster) == uid


@as_root
def test_a_hand_over_that_was_interrupted_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    made_by_nobody(folder)
    chown, left = os.chown, [40]

    def until_killed(
        path: str, uid: int, gid: int, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        chown(path, uid, gid, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "chown", until_killed)
    with pytest.raises(KeyboardInterrupt):
        Cluster(folder, name="state").start()
    monkeypatch.undo()
    assert len({found.st_uid for _, found in everything_in(folder / "pgdata")}) == 2
    with Cluster(folder, name="state") as cluster:
        assert value(cluster) == 7
        assert {found.st_uid for _, found in everything_in(folder / "pgdata")} == {uid_of(cluster)}


@as_root
@pytest.mark.parametrize("kind", ["symbolic link", "hard link"])
def test_a_link_that_was_put_into_the_data_gives_nothing_away(tmp_path: Path, kind: str) -> None:
    folder, outside = tmp_path / "state", tmp_path / "outside"
    made_by_nobody(folder)
    outside.write_text("root's")
    outside.chmod(0o600)
    planted = folder / "pgdata" / "planted"
    if kind == "symbolic link":
        planted.symlink_to(outside)
        with Cluster(folder, name="state") as cluster:
            assert value(cluster) == 7
    else:
        planted.hardlink_to(outside)
        with pytest.raises(Unavailable, match="planted has several names"):
            Cluster(folder, name="state").start()
    assert (outside.stat().st_uid, stat.S_IMODE(outside.stat().st_mode)) == (0, 0o600)


@as_root
def test_a_folder_of_nobody_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(Unavailable, match="belongs to nobody") as refused:
        Cluster(folder, name="state").start()
    assert refused.value.reason == "ClusterOfNobody"


@as_root
def test_where_no_account_can_be_given_the_setting_is_named_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container without the right to mount: the kernel's answer is put in its place."""

    def refused(flags: int) -> None:
        raise PermissionError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(account.kernel, "unshare", refused)
    with pytest.raises(Unavailable, match=USER_VARIABLE) as error:
        Cluster(tmp_path / "state", name="state").start()
    assert error.value.reason == "NoAccountForPostgres"
    assert not (tmp_path / "state" / "pgdata").exists()

    monkeypatch.setenv(USER_VARIABLE, "daemon")
    with Cluster(tmp_path / "state", name="state") as cluster:
        assert uid_of(cluster) == pwd.getpwnam("daemon").pw_uid
    monkeypatch.delenv(USER_VARIABLE)
    with Cluster(tmp_path / "state", name="state") as cluster:
        assert uid_of(cluster) == pwd.getpwnam("daemon").pw_uid, "data of a user stays that user's"


@as_root
@pytest.mark.parametrize("name", ["root", "nobody", "0", str(NOBODY), "no-such-account", "4294967296"])
def test_an_account_that_others_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(USER_VARIABLE, name)
    with pytest.raises(Invalid, match=USER_VARIABLE):
        Cluster(tmp_path / "state", name="state").start()


@as_root
def test_throwaway_clusters_give_their_account_back(tmp_path: Path) -> None:
    """A test run leaves many folders behind; they must not use up the numbers."""
    with Cluster(tmp_path / "first", name="first", throwaway=True) as cluster:
        uid = uid_of(cluster)
        with psycopg.connect(cluster.dsn()) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
        held = accounts.hold_account("operators")
        assert held.uid != uid
        held.release()
    assert not accounts_reserved_for(tmp_path / "first")
    with Cluster(tmp_path / "first", name="first", throwaway=True) as cluster:
        assert value(cluster) == 7


def accounts_reserved_for(folder: Path) -> list[str]:
    kept = Path("/var/lib/tracelake/accounts")
    return [each.name for each in kept.iterdir() if each.read_bytes() == os.fsencode(folder)]


def made_by_nobody(folder: Path) -> None:
    """As versions before this one left it: the folder is root's, the data is nobody's."""
    with Cluster(folder, name="state") as cluster, psycopg.connect(cluster.dsn()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    for path, _ in everything_in(folder / "pgdata"):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    (folder / "owner").unlink(missing_ok=True)
