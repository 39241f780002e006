"""Exported files: their caller's alone, for a day, within a quota, and nothing of a crash stays.

The files belong to the service and can't be opened by anybody else on the machine, operators among them; whoever
asked for one fetches it with the credential that it was asked by.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from tests.support.conversation import dag, reactive, source
from tests.support.databases import build_state_template
from tests.support.postgres import SharedPostgres
from tests.support.query_port import SMALL, QueryPort, open_query_port, open_steps, served, transfers
from tracelake.domain.errors import NotFound, OverQuota, Unavailable
from tracelake.query.app import open_surface
from tracelake.query.export import ExportFolder, ExportOwner
from tracelake.query.settings import QueryLimits

DAG = dag(
    source(),
    source("clock"),
    reactive("work", "src", storage="parquet"),
    reactive("reader", "clock", {"from": {"job": "work", "output": 0}, "trigger": False}),
    publish={"transfers": {"from": {"job": "work"}}},
)
DAY = 24 * 3600


@pytest.fixture(scope="module")
def dsn(postgres_cluster: SharedPostgres) -> Iterator[str]:
    dsn = postgres_cluster.clone("state", build_state_template)
    yield dsn
    postgres_cluster.drop(dsn)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QueryPort]:
    folder = tmp_path_factory.mktemp("query")
    limits = replace(SMALL, export_quota_files=3, export_quota_bytes=200_000)
    async with open_steps(dsn, folder) as ctx, open_query_port(ctx, dsn, limits=limits) as port:
        await port.talk.deploy(DAG)
        await port.talk.trigger(0, 9)
        await port.commit(await port.talk.lease("work"), transfers(range(10), 10), 0, 9)
        yield port


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "port" in request.fixturenames:
        for file in request.getfixturevalue("port").settings.export_root.rglob("*.parquet"):
            file.unlink()


EXPORT: dict[str, Any] = {"sql": "SELECT * FROM transfers", "export": True}


async def _fetch(port: QueryPort, path: str, **headers: str) -> httpx.Response:
    return await port.http.get(path, headers=headers or port.person)


@pytest.mark.asyncio(loop_scope="module")
async def test_whoever_asked_fetches_the_file_and_nobody_else_does(port: QueryPort) -> None:
    answer = (await port.ask(**EXPORT)).json()
    fetched = await _fetch(port, answer["download"])
    assert fetched.status_code == 200
    assert fetched.headers["content-type"] == "application/vnd.apache.parquet"
    assert len(fetched.content) == answer["bytes"]
    assert pq.read_table(io.BytesIO(fetched.content)).num_rows == 10
    claim = await port.claim("reader", 100, by="clock")
    token = claim.capability_token
    assert token is not None
    other = await port.claim("reader", 200, by="clock")
    assert other.capability_token is not None
    own = (await port.ask_as(token, **EXPORT)).json()
    assert own["download"].startswith("/v1/task/exports?")
    query = own["download"].partition("?")[2]
    assert (await _fetch(port, own["download"], **{"X-Trace-Task-Capability": token})).status_code == 200
    stolen = {"X-Trace-Task-Capability": other.capability_token}
    for path, headers in (
        (own["download"], stolen),
        (answer["download"].replace("/v1/", "/v1/task/"), {"X-Trace-Task-Capability": token}),
        (f"/v1/exports?{query}", port.person),
        (f"/v1/exports?query_id={uuid4()}", port.person),
    ):
        refused = await port.http.get(path, headers=headers)
        assert (refused.status_code, refused.json()["reason"]) == (404, "NoSuchExport"), path
    assert (await port.http.get(answer["download"])).status_code == 401
    assert (await _fetch(port, "/v1/exports?query_id=..%2f..%2fetc")).status_code in (400, 422)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_whose_attempt_is_over_fetches_nothing(port: QueryPort) -> None:
    claim = await port.claim("reader", 300, by="clock")
    assert claim.capability_token is not None
    own = (await port.ask_as(claim.capability_token, **EXPORT)).json()
    await port.talk.cancel(claim.task_id)
    refused = await _fetch(port, own["download"], **{"X-Trace-Task-Capability": claim.capability_token})
    assert refused.status_code == 409


@pytest.mark.asyncio(loop_scope="module")
async def test_files_are_closed_to_others_and_not_among_the_objects(port: QueryPort) -> None:
    before = os.umask(0)
    try:
        answer = (await port.ask(**EXPORT)).json()
    finally:
        os.umask(before)
    path = Path(answer["location"].removeprefix("file://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == os.geteuid()
    exports = port.settings.export_root
    assert not path.is_relative_to(port.object_root)
    for folder in (exports, *(each for each in exports.rglob("*") if each.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


@pytest.mark.asyncio(loop_scope="module")
async def test_a_caller_has_so_many_files_and_another_has_its_own(port: QueryPort) -> None:
    together = await asyncio.gather(*(port.ask(**EXPORT) for _ in range(5)))
    assert sorted(answer.status_code for answer in together) == [200, 200, 200, 429, 429]
    refused = await port.ask(**EXPORT)
    assert (refused.status_code, refused.json()["reason"]) == (429, "ExportQuotaExceeded")
    assert "24 h" in refused.json()["detail"]
    assert (await port.audit())[-1]["reason"] == "ExportQuotaExceeded"
    assert (await port.ask("SELECT * FROM transfers")).status_code == 200, "queries go on"
    claim = await port.claim("reader", 400, by="clock")
    assert claim.capability_token is not None
    answers = [await port.ask_as(claim.capability_token, **EXPORT) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert not list(port.settings.export_root.glob(".writing/*"))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_caller_has_so_many_bytes(port: QueryPort) -> None:
    sql = "SELECT uuid() AS a, uuid() AS b FROM range(2500)"
    first = await port.ask(sql, export=True)
    assert first.status_code == 200, first.text
    assert 50_000 < first.json()["bytes"] < 200_000
    answers = [await port.ask(sql, export=True) for _ in range(2)]
    assert answers[-1].status_code == 429, answers[-1].text
    assert answers[-1].json()["reason"] == "ExportQuotaExceeded"
    sizes = [file.stat().st_size for file in port.settings.export_root.rglob("*.parquet")]
    assert sum(sizes) <= 200_000
    assert not list(port.settings.export_root.glob(".writing/*"))


@asynccontextmanager
async def _another_service(port: QueryPort) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        open_surface(port.settings) as (surface, _),
        served(surface) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, headers=port.person) as http,
    ):
        yield http


@pytest.mark.asyncio(loop_scope="module")
async def test_a_service_that_starts_removes_what_is_old_and_what_a_crash_left(port: QueryPort) -> None:
    old, young = [(await port.ask(**EXPORT)).json() for _ in range(2)]
    path = Path(old["location"].removeprefix("file://"))
    os.utime(path, (0, 0))
    leftover, written = (port.settings.export_root / ".writing" / name for name in ("crashed", "locked"))
    for file in (leftover, written):
        file.write_bytes(b"half")
        os.utime(file, (0, 0))
    earlier = port.object_root / "exports" / "users" / str(uuid4())
    earlier.mkdir(parents=True)
    (earlier / "old.parquet").write_bytes(b"x")
    os.utime(earlier / "old.parquet", (0, 0))
    gone = await _fetch(port, old["download"])
    assert gone.status_code == 404, "its time is over, whether it was removed or not"
    with written.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        async with _another_service(port) as http:
            async with asyncio.timeout(20):
                while path.exists() or leftover.exists() or earlier.exists():
                    await asyncio.sleep(0.01)
            assert (await http.get(young["download"])).status_code == 200
            assert written.exists(), "somebody writes it"
    written.unlink()
    assert stat.S_IMODE((port.object_root / "exports").stat().st_mode) == 0o700
    (port.object_root / "exports" / "users").rmdir()
    (port.object_root / "exports").rmdir()


def _folder(tmp_path: Path, **limits: Any) -> tuple[ExportFolder, list[float]]:
    clock = [1_000_000.0]
    return ExportFolder(tmp_path / "exports", replace(QueryLimits(), **limits), now=lambda: clock[0]), clock


def _kept(folder: ExportFolder, owner: ExportOwner, content: bytes = b"rows") -> Path:
    export = folder.begin(owner, uuid4())
    try:
        export.file.write(content)
        folder.grown(export)
        folder.keep(export)
    finally:
        folder.discard(export)
    return export.path


def test_a_file_is_kept_for_its_time_and_no_longer(tmp_path: Path) -> None:
    folder, clock = _folder(tmp_path, export_quota_files=1)
    user = ExportOwner("users", uuid4())
    path = _kept(folder, user)
    clock[0] += DAY - 1
    assert folder.collect().files == 0
    with pytest.raises(OverQuota):
        folder.admit(user)
    clock[0] += 2
    folder.admit(user)
    assert folder.collect().files == 1
    assert not path.parent.exists()
    assert (tmp_path / "exports").is_dir()


def test_attempts_of_a_task_share_its_quota_and_not_its_files(tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path, export_quota_files=2)
    task = uuid4()
    path = _kept(folder, ExportOwner("tasks", task, 1))
    _kept(folder, ExportOwner("tasks", task, 2))
    with pytest.raises(OverQuota):
        folder.begin(ExportOwner("tasks", task, 3), uuid4())
    from_first = folder.path(ExportOwner("tasks", task, 1), uuid4()).parent
    assert path.parent == from_first
    with pytest.raises(NotFound):
        folder.open(ExportOwner("tasks", task, 2), _id(path))
    folder.open(ExportOwner("tasks", task, 1), _id(path)).close()


def _id(path: Path) -> UUID:
    return UUID(path.stem)


def test_all_callers_together_have_so_much(tmp_path: Path) -> None:
    folder, clock = _folder(tmp_path, export_total_bytes=10)
    _kept(folder, ExportOwner("users", uuid4()), b"12345678")
    with pytest.raises(OverQuota) as full:
        _kept(folder, ExportOwner("users", uuid4()), b"12345678")
    assert full.value.reason == "ExportsFull"
    clock[0] += DAY + 1
    folder.collect()
    _kept(folder, ExportOwner("users", uuid4()), b"12345678")


def test_what_was_not_kept_is_gone_and_counts_no_more(tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path, export_quota_files=1)
    user = ExportOwner("users", uuid4())
    export = folder.begin(user, uuid4())
    with pytest.raises(OverQuota):
        folder.admit(user)
    folder.discard(export)
    folder.admit(user)
    assert list((tmp_path / "exports" / ".writing").iterdir()) == []


def test_a_folder_that_somebody_else_put_there_is_not_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "exports").symlink_to(elsewhere)
    folder, _ = _folder(tmp_path)
    with pytest.raises(Unavailable):
        folder.begin(ExportOwner("users", uuid4()), uuid4())
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_was_open_is_closed(tmp_path: Path) -> None:
    (tmp_path / "exports").mkdir(mode=0o755)
    folder, _ = _folder(tmp_path)
    path = _kept(folder, ExportOwner("users", uuid4()))
    for each in (tmp_path / "exports", path.parent, path.parent.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
