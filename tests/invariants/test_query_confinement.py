"""A query's process reaches nothing but what it was handed, and no query runs on an engine that isn't locked."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.support import slot_programs
from tracelake import kernel
from tracelake.domain.errors import Unavailable
from tracelake.query.engine import lockdown
from tracelake.query.engine.confinement import Confinement, PlainSlots, SandboxedSlots
from tracelake.query.engine.restrict import MIB, SlotLimits
from tracelake.query.engine.template import SlotOutput
from tracelake.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.xdist_group("sandbox")

LIMITS = SlotLimits(memory_bytes=256 * MIB, spill_bytes=64 * MIB)
PROBE = "query_probe"


@pytest.fixture(params=["sandbox", "plain process"])
async def confinement(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Confinement]:
    slot_programs.bring_along(monkeypatch)
    held: Confinement
    if request.param == "sandbox":
        held = SandboxedSlots(await Sandbox.open(), LIMITS, PROBE)
    else:
        held = PlainSlots(LIMITS, "asked for", PROBE)
    yield held
    await held.close()


async def probe(confinement: Confinement, tmp_path: Path) -> dict[str, Any]:
    attached, beside = tmp_path / "attached", tmp_path / "beside"
    attached.write_text("attached")
    beside.write_text("beside")
    attached.chmod(0o644)
    order = {"service": os.getpid(), "paths": [str(attached.parent), str(beside), "/etc/hostname", __file__]}
    output = SlotOutput()
    process = await confinement.start(output.write_fd)
    with process.channel, attached.open("rb") as file:
        socket.send_fds(process.channel, [json.dumps(order).encode()], [file.fileno()])
        said = await asyncio.wait_for(asyncio.to_thread(process.channel.makefile("rb").read), 30)
    await process.ended
    complaint = output.take()
    output.close()
    assert said, complaint
    assert attached.read_text() == "attached"
    decoded: dict[str, Any] = json.loads(said)
    return decoded


async def test_nothing_is_in_reach_of_a_querys_process_but_the_attached_file(
    confinement: Confinement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACELAKE_TOKEN", "secret")
    assert kernel.landlock_version() > 0

    said = await probe(confinement, tmp_path)

    assert said["read"] == "attached"
    assert set(said["environment"]) <= {"LD_LIBRARY_PATH", "PWD", "LC_CTYPE"}
    assert said["descriptors"] == [0, 1, 2]
    assert [name for name, outcome in said["outcomes"].items() if outcome != "refused"] == []
    assert len(said["outcomes"]) > 20


def locked(tmp_path: Path, paths: list[str]) -> duckdb.DuckDBPyConnection:
    connection = lockdown.connect(LIMITS, str(tmp_path))
    lockdown.use_threads(connection, LIMITS)
    lockdown.lock(connection, paths)
    return connection


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    duckdb.sql("SELECT 1 AS a").write_parquet(str(tmp_path / "a.parquet"))
    return str(tmp_path / "a.parquet")


def test_a_locked_engine_is_proved_and_opens_nothing_else(tmp_path: Path, parquet: str) -> None:
    other = tmp_path.parent / "other.parquet"
    duckdb.sql("SELECT 2 AS a").write_parquet(str(other))

    connection = locked(tmp_path / "spill", [parquet])

    lockdown.check_connection_settings(connection, LIMITS, str(tmp_path / "spill"))
    lockdown.check_query_settings(connection, [parquet], LIMITS, str(tmp_path / "spill"))
    assert connection.sql(f"FROM '{parquet}'").fetchall() == [(1,)]
    with pytest.raises(duckdb.PermissionException):
        connection.sql(f"FROM '{other}'").fetchall()
    with pytest.raises(duckdb.InvalidInputException, match="locked"):
        connection.execute("SET enable_external_access = true")
    rows = duckdb.sql("SELECT 1").to_arrow_table()
    with pytest.raises(duckdb.CatalogException):
        connection.sql("FROM rows").fetchall()
    assert rows.num_rows == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("autoload_known_extensions", "true"),
        ("autoinstall_known_extensions", "true"),
        ("python_enable_replacements", "true"),
        ("python_scan_all_frames", "true"),
        ("memory_limit", "'2GiB'"),
        ("max_temp_directory_size", "'2GiB'"),
        ("temp_directory", "'/tmp'"),
        ("TimeZone", "'Europe/Berlin'"),
        ("enable_logging", "true"),
    ],
)
def test_a_connection_that_was_not_made_as_meant_is_refused(tmp_path: Path, setting: str, value: str) -> None:
    connection = lockdown.connect(LIMITS, str(tmp_path))
    lockdown.check_connection_settings(connection, LIMITS, str(tmp_path))
    connection.execute(f"SET {setting} = {value}")

    with pytest.raises(Unavailable, match=setting):
        lockdown.check_connection_settings(connection, LIMITS, str(tmp_path))


@pytest.mark.parametrize(
    ("setting", "statement"),
    [
        ("enable_external_access", "SET lock_configuration = true"),
        ("lock_configuration", "SET enable_external_access = false"),
        (
            "allowed_paths",
            "SET allowed_paths = ['/etc/passwd']; SET enable_external_access = false; "
            "SET lock_configuration = true",
        ),
        (
            "allowed_directories",
            "SET allowed_directories = ['/etc']; SET allowed_paths = ['{}']; SET enable_external_access = false; "
            "SET lock_configuration = true",
        ),
        (
            "allowed_configs",
            "SET allowed_configs = ['threads']; SET allowed_paths = ['{}']; SET enable_external_access = false; "
            "SET lock_configuration = true",
        ),
        (
            "threads",
            "SET threads = 17; SET allowed_paths = ['{}']; SET enable_external_access = false; "
            "SET lock_configuration = true",
        ),
    ],
)
def test_an_engine_whose_lock_did_not_take_is_refused(
    tmp_path: Path, parquet: str, setting: str, statement: str
) -> None:
    connection = lockdown.connect(LIMITS, str(tmp_path))
    lockdown.use_threads(connection, LIMITS)
    connection.execute(statement.replace("{}", parquet))

    with pytest.raises(Unavailable, match=setting):
        lockdown.check_query_settings(connection, [parquet], LIMITS, str(tmp_path))
