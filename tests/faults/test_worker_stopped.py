"""A worker that stands still past its lease is replaced; when it wakes up it changes nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.support.processes import DispatcherProcess
from tests.support.site import Databases, open_single_task, open_site

SCRIPT = Path(__file__).with_name("staging_worker.py")


class StagingWorker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            return json.loads(await self.process.stdout.readline())

    async def told_to_complete(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return await self.heard()


@asynccontextmanager
async def worker(replica: DispatcherProcess, task_id: str, name: str) -> AsyncIterator[StagingWorker]:
    token = replica.worker_headers["X-Trace-Worker-Token"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), replica.internal_url, token, task_id, name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield StagingWorker(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_worker_that_slept_past_its_lease_commits_none_of_its_files(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        open_single_task(site.replicas[0], storage="parquet") as task,
        worker(site.replicas[0], task.task_id, "slow") as slow,
    ):
        one, other = site.replicas
        staged = await slow.heard()
        assert staged["claim"]["attempt"] == 1
        slow.process.send_signal(signal.SIGSTOP)
        shown = await task.becomes(one, "Queued")
        assert [each["outcome"] for each in shown["attempts"]] == ["TimedOut"]
        async with worker(other, task.task_id, "quick") as quick:
            winning = await quick.heard()
            assert winning["claim"]["attempt"] == 2
            slow.process.send_signal(signal.SIGCONT)
            assert await slow.told_to_complete() == {"status": 409, "reason": "StaleAttempt"}
            assert (await task.show(one))["outputs"][0]["partitions"] == []
            assert (await quick.told_to_complete())["status"] == 200
        partitions = await committed(one)
        assert [each["location"] for each in partitions] == [winning["output"]["location"]]
        assert staged["output"]["location"] != winning["output"]["location"]
        for each, content in ((staged, "rows of slow"), (winning, "rows of quick")):
            [file] = each["output"]["manifest"]["files"]
            assert Path(urlsplit(file["location"]).path).read_text() == content


async def committed(replica: DispatcherProcess) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        answer = await http.get(
            f"{replica.user_url}/v1/datasets/rows/partitions", headers=replica.user_headers
        )
    assert answer.status_code == 200, answer.text
    return answer.json()["partitions"]


async def test_a_worker_that_wakes_up_before_anybody_else_claimed_may_still_complete(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        open_single_task(site.replicas[0], storage="parquet") as task,
        worker(site.replicas[0], task.task_id, "slow") as slow,
    ):
        staged = await slow.heard()
        slow.process.send_signal(signal.SIGSTOP)
        await task.becomes(site.replicas[0], "Queued")
        slow.process.send_signal(signal.SIGCONT)
        assert (await slow.told_to_complete())["status"] == 200
        assert [each["location"] for each in await committed(site.replicas[0])] == [
            staged["output"]["location"]
        ]
        claim = (await task.claim(site.replicas[1], worker="late")).json()
        assert (claim["status"], claim["reason"]) == ("NotClaimed", "Completed")
