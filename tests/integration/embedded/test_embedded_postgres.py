"""The embedded Postgres keeps what was committed, lets nobody else in and leaves nothing running."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from tracelake.domain.errors import Conflict, Invalid, TracelakeError, Unavailable
from tracelake.embedded.postgres import Cluster
from tracelake.embedded.postgres import server as binaries
from tracelake.embedded.postgres.account import Account, server_account

# A launcher in a process of its own, which can be killed, limited, or be somebody else. What it imports is
# imported before it becomes that somebody, who may not be able to read this interpreter's files.
LAUNCHER = """
import json, os, resource, sys
from pathlib import Path
from tracelake.domain.errors import TracelakeError
from tracelake.embedded.postgres import Cluster, server as binaries
from tracelake.embedded.postgres.account import Account

folder, uid, gid, file_limit = Path(sys.argv[1]), *map(int, sys.argv[2:])
if uid != os.geteuid():
    programs = binaries.binaries_executable_by(Account("user", uid, gid))
    binaries.installed_binaries = lambda: programs
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
if file_limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
cluster = Cluster(folder, name="launched")
try:
    cluster.start()
except TracelakeError as error:
    print(json.dumps({"reason": error.reason, "message": error.message}), flush=True)
    sys.exit(1)
print(json.dumps({"pid": cluster.pid, "dsn": cluster.dsn()}), flush=True)
sys.stdin.read()
cluster.stop()
"""


@pytest.fixture
def tmp_path(path_in_memory: Path) -> Path:
    return path_in_memory


@contextmanager
def launcher(
    folder: Path, account: Account | None = None, file_limit: int = 0
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    uid, gid = (account.uid, account.gid) if account else (os.geteuid(), os.getegid())
    command = [sys.executable, "-c", LAUNCHER, str(folder), str(uid), str(gid), str(file_limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        try:
            yield process, said
        finally:
            process.communicate(timeout=30)


def normal_user() -> Account:
    """Somebody who is neither root nor ``nobody``: ourselves, or an account that every machine has."""
    if os.geteuid() != 0:
        return Account(pwd.getpwuid(os.geteuid()).pw_name, os.geteuid(), os.getegid())
    entry = pwd.getpwnam("daemon")
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


@pytest.fixture
def user_folder() -> Iterator[Path]:
    """A folder that a normal user owns and can reach, which pytest's own (0700) isn't."""
    made = Path(tempfile.mkdtemp())
    user = normal_user()
    os.chown(made, user.uid, user.gid)
    yield made
    shutil.rmtree(made)


STATE_OF = "SELECT state FROM pg_stat_activity WHERE pid = %s"


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for 30 s in vain"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_in(folder: Path) -> list[int]:
    """Everything that has a folder of the cluster as its working directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd").startswith(str(folder)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def one(dsn: str, query: str, *arguments: object) -> object:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query, arguments or None).fetchone()
        assert row is not None
        return row[0]


def run(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement)


def kill_server(cluster: Cluster) -> None:
    assert cluster.pid is not None
    os.kill(cluster.pid, signal.SIGKILL)
    eventually(lambda: cluster.pid is None)


def test_a_home_that_only_its_owner_may_enter_is_served_and_left_as_it_was(tmp_path: Path) -> None:
    home = tmp_path / "a home with spaces, and 'quotes'"
    home.mkdir(mode=0o700)
    folder = home / ("deep" * 30) / "state"
    with Cluster(folder, name="state") as cluster:
        run(cluster.dsn(), "CREATE TABLE kept AS SELECT 7 AS n")
    with Cluster(folder, name="state") as cluster:
        assert one(cluster.dsn(), "SELECT n FROM kept") == 7
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert home.stat().st_uid == os.geteuid()


def test_the_server_never_runs_as_root_and_cannot_read_the_passwords(tmp_path: Path) -> None:
    with Cluster(tmp_path / "state", name="state") as cluster:
        server = Path(f"/proc/{cluster.pid}").stat()
        assert server.st_uid != 0
    passwords = tmp_path / "state" / "passwords.json"
    assert stat.S_IMODE(passwords.stat().st_mode) == 0o600
    assert passwords.stat().st_uid == os.geteuid()


def test_a_normal_user_runs_it_as_themselves(user_folder: Path) -> None:
    user = normal_user()
    with launcher(user_folder / "state", user) as (process, said):
        assert one(said["dsn"], "SELECT 1") == 1
        assert Path(f"/proc/{said['pid']}").stat().st_uid == user.uid
        os.kill(int(said["pid"]), signal.SIGKILL)
        process.kill()
    with launcher(user_folder / "state", user) as (_, said):
        assert one(said["dsn"], "SELECT 1") == 1
    assert processes_in(user_folder) == []


def test_data_that_a_user_made_stays_theirs_when_root_starts_it(user_folder: Path) -> None:
    user = normal_user()
    with launcher(user_folder / "state", user):
        pass
    with Cluster(user_folder / "state", name="state") as cluster:
        assert Path(f"/proc/{cluster.pid}").stat().st_uid == user.uid


def test_commits_survive_a_killed_server_whose_backend_is_still_busy(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, name="state")
    with cluster:
        run(cluster.dsn(), "CREATE TABLE kept AS SELECT 7 AS n")
        busy = psycopg.connect(cluster.dsn(), autocommit=True)
        backend = busy.info.backend_pid
        busy.pgconn.send_query(b"DO $$ BEGIN LOOP END LOOP; END $$")
        eventually(lambda: one(cluster.dsn(), STATE_OF, backend) == "active")
        kill_server(cluster)
        assert is_alive(backend)
    assert not is_alive(backend)
    busy.close()
    with cluster:
        assert one(cluster.dsn(), "SELECT n FROM kept") == 7


def test_a_start_ends_what_a_killed_launcher_and_server_left_running(tmp_path: Path) -> None:
    with launcher(tmp_path) as (process, said):
        run(said["dsn"], "CREATE TABLE kept AS SELECT 7 AS n")
        busy = psycopg.connect(said["dsn"], autocommit=True)
        backend = busy.info.backend_pid
        busy.pgconn.send_query(b"DO $$ BEGIN LOOP END LOOP; END $$")
        eventually(lambda: one(said["dsn"], STATE_OF, backend) == "active")
        os.kill(int(said["pid"]), signal.SIGKILL)
        process.kill()
    assert is_alive(backend)
    with Cluster(tmp_path, name="state") as cluster:
        assert not is_alive(backend)
        assert one(cluster.dsn(), "SELECT n FROM kept") == 7
    busy.close()


def test_a_server_whose_launcher_is_killed_shuts_itself_down(tmp_path: Path) -> None:
    with launcher(tmp_path) as (process, said):
        run(said["dsn"], "CREATE TABLE kept AS SELECT 7 AS n")
        process.kill()
        eventually(lambda: not is_alive(int(said["pid"])))
    assert processes_in(tmp_path) == []
    # Who would have written down that it was shut down is gone; the next server finds that it was.
    with Cluster(tmp_path, name="state") as cluster:
        assert one(cluster.dsn(), "SELECT n FROM kept") == 7
    log = (tmp_path / "server.log").read_text()
    assert "database system was shut down" in log
    assert "not properly shut down" not in log


def test_a_start_waits_for_the_server_of_a_killed_launcher_to_leave(tmp_path: Path) -> None:
    with launcher(tmp_path) as (process, said):
        run(said["dsn"], "CREATE TABLE kept AS SELECT 7 AS n")
        process.kill()
        process.wait()
        with Cluster(tmp_path, name="state") as cluster:
            assert one(cluster.dsn(), "SELECT n FROM kept") == 7


def test_the_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, name="state")
    thread = threading.Thread(target=cluster.start)
    thread.start()
    thread.join()
    try:
        assert one(cluster.dsn(), "SELECT 1") == 1
        eventually(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())
        assert one(cluster.dsn(), "SELECT 1") == 1
        assert cluster.pid is not None
    finally:
        cluster.stop()


@pytest.mark.parametrize("holder", ["nobody any more", "another program of the same account"])
def test_a_stale_pid_file_does_not_keep_it_from_starting(tmp_path: Path, holder: str) -> None:
    cluster = Cluster(tmp_path, name="state")
    with cluster:
        kill_server(cluster)
    pid_file = tmp_path / "pgdata" / "postmaster.pid"
    server = server_account(tmp_path, tmp_path / "pgdata")
    account = server.account if server else None
    other = subprocess.Popen(
        ["sleep", "60"], user=account.uid if account else None, group=account.gid if account else None
    )
    if holder == "nobody any more":
        other.kill()
        other.wait()
    lines = pid_file.read_text().splitlines() if pid_file.exists() else [""] * 7
    pid_file.write_text("\n".join([str(other.pid), *lines[1:], ""]))
    try:
        with cluster:
            assert one(cluster.dsn(), "SELECT 1") == 1
    finally:
        other.kill()
        other.wait()


def test_a_second_launcher_on_a_live_folder_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, name="first") as cluster:
        with pytest.raises(Conflict, match="another process") as refused:
            Cluster(tmp_path, name="second").start()
        assert refused.value.reason == "ClusterInUse"
        assert one(cluster.dsn(), "SELECT 1") == 1


def test_two_clusters_started_at_once_run_side_by_side(tmp_path: Path) -> None:
    clusters = [Cluster(tmp_path / name, name=name) for name in ("state", "data")]
    threads = [threading.Thread(target=cluster.start) for cluster in clusters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert [one(cluster.dsn(), "SHOW cluster_name") for cluster in clusters] == ["state", "data"]
    finally:
        for cluster in clusters:
            cluster.stop()


def test_stop_leaves_no_process_and_no_lock(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, name="state")
    with cluster:
        session = psycopg.connect(cluster.dsn())
        session.execute("SELECT 1")
        assert len(processes_in(tmp_path)) > 2
    assert cluster.pid is None
    assert processes_in(tmp_path) == []
    session.close()
    with cluster:
        assert one(cluster.dsn(), "SELECT 1") == 1


@pytest.mark.parametrize("password", ["wrong", ""])
def test_nobody_gets_in_without_the_password(tmp_path: Path, password: str) -> None:
    with Cluster(tmp_path, name="state") as cluster:
        parts = urlsplit(cluster.dsn())
        credentials = f"postgres:{password}" if password else "postgres"
        dsn = urlunsplit(parts._replace(netloc=f"{credentials}@127.0.0.1:{cluster.port}"))
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(dsn)
        with psycopg.connect(cluster.dsn()) as connection:
            rules = connection.execute("SELECT type, address, auth_method FROM pg_hba_file_rules").fetchall()
    assert rules == [("host", "127.0.0.1", "scram-sha-256"), ("local", None, "scram-sha-256")]


def test_it_listens_on_one_address_and_on_no_socket_file(tmp_path: Path) -> None:
    with Cluster(tmp_path, name="state") as cluster:
        for address in ("127.0.0.2", "::1"):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family) as probe, pytest.raises(OSError, match=r"refused|[Aa]ssign|unreach"):
                probe.connect((address, cluster.port))
        assert one(cluster.dsn(), "SHOW listen_addresses") == "127.0.0.1"
        assert one(cluster.dsn(), "SHOW unix_socket_directories") == ""


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("full_page_writes", "on"),
        ("data_checksums", "on"),
        ("server_encoding", "UTF8"),
        ("lc_collate", None),
        ("timezone", "UTC"),
        ("deadlock_timeout", "200ms"),
        ("jit", "off"),
    ],
)
def test_it_runs_with_durable_settings(durable: Cluster, setting: str, value: str | None) -> None:
    if value is None:
        query = "SELECT datcollate FROM pg_database WHERE datname = current_database()"
        assert one(durable.dsn(), query) == "C"
        return
    assert one(durable.dsn(), f"SHOW {setting}") == value


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("durable"), name="durable") as cluster:
        yield cluster


def test_durability_cannot_be_overridden_by_a_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fsync"):
        Cluster(tmp_path, name="state", settings={"fsync": "off"})


def test_a_role_enters_its_own_database_and_no_other(durable: Cluster) -> None:
    for _ in range(2):
        durable.ensure_role("queue")
        durable.ensure_database("queue", owner="queue")
        durable.ensure_database("state")
    run(durable.dsn("queue", user="queue"), "CREATE TABLE IF NOT EXISTS message (id int)")
    for database in ("state", "postgres", "template1"):
        with pytest.raises(psycopg.OperationalError, match="permission denied"):
            psycopg.connect(durable.dsn(database, user="queue"))


def test_a_database_left_open_by_a_crash_is_closed_the_next_time(durable: Cluster) -> None:
    durable.ensure_role("stranger")
    run(durable.dsn(), "CREATE DATABASE half_made")
    run(durable.dsn("half_made", user="stranger"), "SELECT 1")
    durable.ensure_database("half_made")
    with pytest.raises(psycopg.OperationalError, match="permission denied"):
        psycopg.connect(durable.dsn("half_made", user="stranger"))


def test_the_log_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "server.log").symlink_to(target)
    with pytest.raises(Unavailable) as refused:
        Cluster(tmp_path / "state", name="state").start()
    assert refused.value.reason == "ClusterFolderUnusable"
    assert target.read_text() == "untouched"


def test_passwords_reach_neither_the_log_nor_the_repr(durable: Cluster) -> None:
    durable.ensure_role("secretive")
    for user in ("postgres", "secretive"):
        password = urlsplit(durable.dsn(user=user)).password
        assert password
        assert password not in durable.log_file.read_text() + repr(durable)


def test_a_restart_keeps_its_dsn_until_the_port_is_taken(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, name="state")
    with cluster:
        first = cluster.dsn()
    with cluster:
        assert cluster.dsn() == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", cluster.port))
        taken.listen()
        with pytest.raises(Conflict) as refused:
            Cluster(tmp_path, name="state", port=cluster.port).start()
        assert refused.value.reason == "PortInUse"
        with cluster:
            assert cluster.dsn() != first
            assert one(cluster.dsn(), "SELECT 1") == 1


def test_data_of_another_major_version_is_refused_untouched(tmp_path: Path) -> None:
    with Cluster(tmp_path, name="state"):
        pass
    version = tmp_path / "pgdata" / "PG_VERSION"
    version.write_text("16\n")
    with pytest.raises(Invalid, match="Postgres 16") as refused:
        Cluster(tmp_path, name="state").start()
    assert refused.value.reason == "ClusterVersionMismatch"
    version.write_text("18\n")
    with Cluster(tmp_path, name="state") as cluster:
        assert one(cluster.dsn(), "SELECT 1") == 1


def test_a_server_that_does_not_come_up_is_quoted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, name="state", settings={"shared_buffers": "plenty"})
    with pytest.raises(Unavailable, match="shared_buffers") as refused:
        cluster.start()
    assert refused.value.reason == "ClusterStartFailed"
    assert cluster.pid is None


def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TracelakeError, match="Not a directory") as refused:
        Cluster(tmp_path / "file" / "state", name="state").start()
    assert refused.value.reason == "ClusterFolderUnusable"


def test_a_folder_that_the_user_may_not_write_is_named(user_folder: Path) -> None:
    user_folder.chmod(0o500)
    with launcher(user_folder / "state", normal_user()) as (_, said):
        assert said["reason"] == "ClusterFolderUnusable"
        assert str(user_folder) in said["message"]


def test_a_disk_that_fills_up_during_initialization_leaves_nothing_half_done(tmp_path: Path) -> None:
    with launcher(tmp_path, file_limit=64 * 1024) as (_, said):
        assert said["reason"] == "ClusterInitFailed"
        assert "initdb" in said["message"]
    assert not (tmp_path / "pgdata").exists()
    with Cluster(tmp_path, name="state") as cluster:
        assert one(cluster.dsn(), "SELECT 1") == 1
    assert list(tmp_path.glob("pgdata.new-*")) == []


@pytest.mark.parametrize("planted", [False, True])
def test_programs_that_the_account_cannot_reach_are_copied_to_where_it_can(
    tmp_path: Path, user_folder: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    installed, hidden = binaries.installed_binaries(), binaries.Binaries(private)
    shutil.copytree(installed.root, hidden.root, ignore=shutil.ignore_patterns("include"))
    if installed.libraries.is_dir():
        shutil.copytree(installed.libraries, hidden.libraries)
    cache = user_folder / "cache"
    os.chown(user_folder, os.geteuid(), os.getegid())
    user_folder.chmod(0o755)
    monkeypatch.setattr(binaries, "installed_binaries", lambda: hidden)
    monkeypatch.setattr(binaries, "_SHARED_CACHE", cache)
    monkeypatch.setattr(tempfile, "tempdir", str(user_folder))
    if planted:
        (user_folder / "cache").symlink_to(private)
        cache = user_folder / "tracelake-cache"
    for _ in range(2):
        with Cluster(tmp_path / "state", name="state") as cluster:
            assert one(cluster.dsn(), "SELECT 1") == 1
    assert len(list(cache.glob("*"))) == (1 if os.geteuid() == 0 else 0)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
