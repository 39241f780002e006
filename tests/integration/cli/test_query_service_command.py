"""``tracelake query-service`` as a process: there before its databases, gone when told, silent on queries."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.databases import role_dsn
from tests.support.dev_stack import eventually, is_gone
from tests.support.query_port import ENDLESS, grant_roles
from tests.support.surfaces import open_surfaces
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Invalid
from tracelake.kernel import parent_death_hook
from tracelake.query.settings import QueryLimits, tuned
from tracelake.store.query_roles import AUDIT_ROLE, CATALOG_ROLE


class Service:
    def __init__(self, process: subprocess.Popen[bytes], ready: Path, log: Path) -> None:
        self.process = process
        self.log = log
        self.url = eventually("the service listens", lambda: self._url(ready))

    def _url(self, ready: Path) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        if not ready.exists():
            return None
        handle = json.loads(ready.read_bytes())
        assert handle["pid"] == self.process.pid
        return str(handle["url"])

    def children(self) -> list[int]:
        """Everything below it, however deep."""
        found, pending = [], [self.process.pid]
        while pending:
            pid = pending.pop()
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                below = [int(child) for child in task.read_text().split()]
                found += below
                pending += below
        return found


@contextmanager
def running(folder: Path, state_dsn: str) -> Iterator[Service]:
    ready, log = folder / "ready.json", folder / "query.log"
    given = {
        "TRACELAKE_CATALOG_DSN": role_dsn(state_dsn, CATALOG_ROLE),
        "TRACELAKE_AUDIT_DSN": role_dsn(state_dsn, AUDIT_ROLE),
        "TRACELAKE_OBJECTS": str(folder / "objects"),
        "TRACELAKE_QUERY_SECONDS": "60",
    }
    command = [sys.executable, "-m", "tracelake", "query-service", "--home", str(folder), "--port", "0"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--slots", "1", "--ready-file", str(ready)],
            env={**os.environ, **given},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=parent_death_hook(signal.SIGINT),
        )
    try:
        yield Service(process, ready, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


async def test_the_service_waits_for_its_databases_and_says_nothing_of_what_was_asked(
    ctx: StepContext, state_dsn: str, tmp_path: Path
) -> None:
    async with open_surfaces(ctx) as surfaces:
        headers = {"Authorization": f"Bearer {surfaces.user_token}"}
        with running(tmp_path, state_dsn) as service:
            async with httpx.AsyncClient(base_url=service.url, headers=headers, timeout=30) as http:
                assert (await http.get("/healthz")).status_code == 200
                missing = await http.get("/readyz")
                assert (missing.status_code, missing.json()["reason"]) == (503, "NotReady")
                assert "catalog" in missing.json()["detail"]
                assert (await http.post("/v1/query", json={"sql": "SELECT 1"})).status_code == 503
                await grant_roles(state_dsn)
                assert (await http.get("/readyz")).status_code == 200
                for sql in (
                    "SELECT 'sesame_one'",
                    "SELECT sesame_two",
                    "SELEC sesame_three",
                    "COPY sesame_four TO 'x'",
                ):
                    await http.post("/v1/query", json={"sql": sql, "params": []})
                answer = await http.post("/v1/query", json={"sql": "SELECT ?", "params": ["sesame_five"]})
                assert answer.json()["rows"] == [["sesame_five"]]
                await stops_at_once(http, service)
            log = service.log.read_text()
            assert log.count('"query_id"') == 4
            assert "sesame" not in log
            assert surfaces.user_token not in log


async def stops_at_once(http: httpx.AsyncClient, service: Service) -> None:
    """While a query runs that would run for ever."""
    asking = asyncio.create_task(http.post("/v1/query", json={"sql": ENDLESS}))
    async with asyncio.timeout(20):
        while "tracelake_query_slots_busy 1.0" not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.02)
    children = service.children()
    assert children
    service.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(service.process.wait, 10) == 0
    eventually("no process is left behind", lambda: all(map(is_gone, children)))
    answer = await asking
    assert (answer.status_code, answer.json()["reason"]) == (503, "Stopping")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TRACELAKE_QUERY_SECONDS", "soon"),
        ("TRACELAKE_QUERY_THREADS", "0"),
        ("TRACELAKE_QUERY_DEFAULT_ROWS", "9" * 9),
    ],
)
def test_settings_that_make_no_sense_are_named(variable: str, value: str) -> None:
    with pytest.raises(Invalid, match=variable):
        tuned(QueryLimits(), {variable: value})
