"""Ports of a stack are its own: also while whoever listens there is down, and whoever connects and says nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import asyncpg
import psycopg
import pytest

from tests.support.attack.neighbour_process import as_user
from tests.support.dev_stack import eventually
from tracelake.dev.child_process import ChildProcess, ChildSpec
from tracelake.embedded.postgres import Cluster, PortRelay, port_dsn, private_dsn
from tracelake.embedded.postgres.cluster import socket_path
from tracelake.embedded.postgres.port_relay import CONNECTIONS
from tracelake.serving.local_sockets import LOOPBACK, HeldPort, handed_down, inherited, uid_of_loopback_peer

NEIGHBOUR = 59_873 if os.geteuid() == 0 else None
SERVER = """
import os, socket, sys
from tracelake.serving.local_sockets import inherited
listening = inherited("user", "127.0.0.1", int(sys.argv[1]), os.environ)
assert "TRACELAKE_LISTEN_FDS" not in os.environ
listening.listen(16)
open(sys.argv[2], "w").write(str(os.getpid()))
while True:
    connection, _ = listening.accept()
    connection.sendall(b"%d" % os.getpid())
    connection.close()
"""


def takes_port(port: int) -> list[str]:
    """Each way of listening on the port that isn't closed to whoever calls this."""
    found = []
    for address in (LOOPBACK, "0.0.0.0"):
        for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
            with socket.socket() as rude:
                for option in options:
                    rude.setsockopt(socket.SOL_SOCKET, option, 1)
                try:
                    rude.bind((address, port))
                    rude.listen()
                    found.append(f"{address} with {options}")
                except OSError:
                    continue
    return found


@pytest.fixture
def port() -> Iterator[HeldPort]:
    held = HeldPort(0)
    yield held
    held.close()


def answer_on(port: HeldPort) -> bytes:
    with socket.create_connection((LOOPBACK, port.number), timeout=30) as connection:
        return connection.makefile("rb").read()


def test_a_port_stays_with_its_holder_whether_or_not_its_server_runs(port: HeldPort, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    spec = ChildSpec(
        name="server",
        argv=lambda: [sys.executable, "-c", SERVER, str(port.number), str(ready)],
        ready=lambda pid: ready.exists() and ready.read_text() == str(pid),
        folder=tmp_path,
        log=tmp_path / "server.log",
        env=lambda: dict(os.environ),
        listens={"user": port},
    )
    with pytest.raises(ConnectionRefusedError):
        answer_on(port)
    assert takes(port) == []
    server = ChildProcess(spec)
    for _ in range(2):
        server.start(threading.Event())
        assert answer_on(port) == str(server.pid).encode()
        assert takes(port) == []
        assert server.pid is not None
        os.kill(server.pid, 9)
        eventually("the server is dead", lambda: not server.alive)
        assert takes(port) == []
    server.stop()
    assert takes(port) == []
    with pytest.raises(ConnectionRefusedError):
        answer_on(port)


def takes(port: HeldPort) -> list[str]:
    found: list[str] = as_user(NEIGHBOUR, __name__, "takes_port", port=port.number)
    return found


def test_connections_of_the_last_run_do_not_keep_a_port_from_its_stack(port: HeldPort) -> None:
    assert port.socket is not None
    port.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.socket.listen()
    with socket.create_connection((LOOPBACK, port.number)) as client:
        server, _ = port.socket.accept()
        server.close()
        assert client.recv(1) == b""
    port.close()
    again = HeldPort(port.number)
    assert again.number == port.number
    again.close()


def test_an_inherited_socket_of_another_address_is_not_listened_on(port: HeldPort) -> None:
    environment, _ = handed_down({"user": port})
    assert inherited("internal", LOOPBACK, port.number, environment) is None
    assert port.socket is not None
    duplicate = os.dup(port.socket.fileno())
    environment = {"TRACELAKE_LISTEN_FDS": f"user={duplicate}"}
    assert inherited("user", LOOPBACK, port.number + 1, environment) is None
    assert environment == {}
    for nonsense in ("9" * 5000, "-1", "x", "\N{ARABIC-INDIC DIGIT SEVEN}"):
        environment = {"TRACELAKE_LISTEN_FDS": f"user={nonsense}"}
        assert inherited("user", LOOPBACK, port.number, environment) is None


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, HeldPort, Path]]:
    """A private cluster, in a folder whose path is too long for a socket's address, with a port."""
    folder = tmp_path_factory.mktemp("private") / ("a" * 60) / ("b" * 60)
    port, relay = HeldPort(0), PortRelay()
    with ExitStack() as ending:
        ending.callback(port.close)
        ending.callback(relay.close)
        cluster = ending.enter_context(Cluster(folder, name="private", private=True, throwaway=True))
        relay.serve(port, lambda: socket_path(folder))
        yield cluster, port, folder


def by_port(cluster: Cluster, port: HeldPort) -> str:
    login = cluster.dsn().partition("//")[2].partition("@")[0]
    return port_dsn(port.number, "postgres").replace("//", f"//{login}@")


async def test_a_private_cluster_is_reached_by_its_socket_and_by_its_port(
    private: tuple[Cluster, HeldPort, Path],
) -> None:
    cluster, port, folder = private
    assert str(folder) not in cluster.dsn()
    for dsn in (cluster.dsn(), by_port(cluster, port)):
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("SHOW listen_addresses") == ""
        # More than any buffer on the way, in both directions.
        assert len(await connection.fetchval("SELECT $1::text || 'x'", "y" * 5_000_000)) == 5_000_001
        with pytest.raises(asyncio.TimeoutError):
            await connection.fetchval("SELECT pg_sleep(60)", timeout=0.2)
        assert (
            await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query ~ '^SELECT pg_sl'")
            == 0
        )
        await connection.close()
    copied = "COPY (SELECT repeat('z', 1000) FROM generate_series(1, 20000)) TO STDOUT"
    with (
        psycopg.connect(by_port(cluster, port)) as copying,
        copying.cursor() as cursor,
        cursor.copy(copied) as copy,
    ):
        assert sum(len(part) for part in copy) == 20_000 * 1001


def test_nobody_else_reaches_the_socket(private: tuple[Cluster, HeldPort, Path]) -> None:
    _, _, folder = private
    if NEIGHBOUR is None:
        pytest.skip("another user can be tried by root alone")
    path = folder / "pgdata" / ".s.PGSQL.5432"
    assert path.is_socket()
    assert as_user(NEIGHBOUR, __name__, "connects", path=socket_path(folder)) is False
    assert "127.0.0.1" not in private_dsn(folder, "x")


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:
            return False
    return True


SILENT = """
import os, socket, sys
connect, _ = socket.create_connection, "localhost".encode("idna")
if len(sys.argv) > 3:
    os.setuid(int(sys.argv[3]))
held = [connect(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("silent", flush=True)
sys.stdin.read()
"""


def test_those_who_connect_and_say_nothing_keep_nobody_out(private: tuple[Cluster, HeldPort, Path]) -> None:
    cluster, port, _ = private
    who = () if NEIGHBOUR is None else (str(NEIGHBOUR),)
    arguments = [sys.executable, "-c", SILENT, str(port.number), str(4 * CONNECTIONS), *who]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as silent:
        assert silent.stdout is not None
        assert silent.stdin is not None
        assert silent.stdout.readline() == "silent\n"
        for _ in range(20):
            with psycopg.connect(by_port(cluster, port), connect_timeout=10) as one:
                assert one.execute("SELECT 1").fetchone() == (1,)
        with psycopg.connect(cluster.dsn()) as inside:
            found = inside.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL"
            ).fetchone()
        assert found is not None
        assert found[0] < 10
        silent.stdin.close()


def packet(*parameters: bytes, code: int = 196608) -> bytes:
    body = b"".join(each + b"\0" for each in parameters) + b"\0"
    return struct.pack("!II", len(body) + 8, code) + body


NO_GREETINGS = {
    "a walsender": packet(b"user", b"x", b"replication", b"A\n" * 1000),
    "a long walsender": packet(b"user", b"x", b"replication", b"A\n" * 4900),
    "a walsender by another case": packet(b"user", b"x", b"REPLICATION", b"true"),
    "a large one": packet(b"user", b"x", b"options", b"y" * 8000),
    "a long value": packet(b"user", b"x", b"options", b"y" * 2000),
    "a long user": packet(b"user", b"x" * 64),
    "lines in a value": packet(b"user", b"x", b"application_name", b"a\nb"),
    "lines in a name": packet(b"user", b"x", b"a\nb", b"c"),
    "no user": packet(b"database", b"x"),
    "a user twice": packet(b"user", b"x", b"user", b"y"),
    "half a parameter": packet(b"user", b"x", b"database"),
    "another protocol": packet(b"user", b"x", code=2 << 16),
    "no length": struct.pack("!I", 0) + b"x" * 20,
    "an endless length": struct.pack("!I", 0xFFFFFFFF) + b"x" * 20,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "encryption for ever": struct.pack("!II", 8, 80877103) * 3,
}


def test_what_no_driver_says_first_is_not_passed_on_and_leaves_nothing_in_the_log(
    private: tuple[Cluster, HeldPort, Path],
) -> None:
    cluster, port, _ = private
    before = cluster.log_file.read_bytes()
    for what, greeting in NO_GREETINGS.items():
        with socket.create_connection((LOOPBACK, port.number), timeout=10) as stranger:
            stranger.sendall(greeting)
            answer = stranger.makefile("rb").read()
        assert b"the port takes no such startup packet" in answer, what
    with psycopg.connect(by_port(cluster, port)) as one:
        assert one.execute("SELECT 1").fetchone() == (1,)
    assert cluster.log_file.read_bytes() == before


def test_a_greeting_may_come_byte_by_byte(private: tuple[Cluster, HeldPort, Path]) -> None:
    _, port, _ = private
    with socket.create_connection((LOOPBACK, port.number), timeout=10) as client:
        for request in (80877103, 80877104):
            client.sendall(struct.pack("!II", 8, request))
            assert client.recv(1) == b"N"
        greeting = packet(b"user", b"postgres", b"database", b"postgres", b"TimeZone", b"UTC", code=196610)
        for byte in greeting:
            client.sendall(bytes([byte]))
        assert client.recv(1) in (b"R", b"v")


def test_what_a_login_makes_the_server_say_does_not_fill_the_disk(
    private: tuple[Cluster, HeldPort, Path],
) -> None:
    """Neither by a long message, nor by a long statement, nor by many."""
    cluster, port, _ = private
    before = cluster.log_file.stat().st_size
    with psycopg.connect(by_port(cluster, port), autocommit=True) as one:
        for statement in ("SELECT repeat('y', 20000000)::int", "SELECT 1/0 /*" + "x" * 5_000_000 + "*/"):
            with pytest.raises(psycopg.Error):
                one.execute(statement)
    eventually("the message is there", lambda: b"division by zero" in cluster.log_file.read_bytes())
    assert cluster.log_file.stat().st_size - before < 64 * 1024
    assert b"bytes more)" in cluster.log_file.read_bytes()


def test_one_is_told_by_the_kernel_who_is_at_the_other_end() -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        assert uid_of_loopback_peer(accepted.getpeername(), accepted.getsockname()) == os.geteuid()
        assert uid_of_loopback_peer(("10.1.2.3", 5), accepted.getsockname()) is None
        assert uid_of_loopback_peer(("127.0.0.1", 1), accepted.getsockname()) is None
        assert uid_of_loopback_peer(None, None) is None
        assert client.getsockname() == accepted.getpeername()
