"""One task driven by hand over HTTP, on a runtime that no worker of the load serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tracelake.testing.dispatcher_process import DispatcherProcess

LEASE_SECONDS = 2

DAG = f"""
name: single
jobs:
  - {{ name: src, activation: source, runtime: dispatcher, source: {{ kind: manual }}, outputs: 1 }}
  - name: work
    activation: reactive
    runtime: ecs_spark
    operator: own
    inputs: [{{ from: {{ job: src, output: 0 }} }}]
    outputs: [{{ name: rows, storage: STORAGE }}]
    execution_strategy: PerPartition
    heartbeat_timeout_seconds: {LEASE_SECONDS}
    retry: {{ base: 0, max: 1 }}
    max_attempts: 20
publish:
  rows: {{ from: {{ job: work, output: 0 }} }}
"""

Answered = dict[str, Any]


class SingleTask:
    """Each call goes to the replica that it names, once; what isn't expected to fail must not."""

    def __init__(self, http: httpx.AsyncClient, task_id: str) -> None:
        self._http = http
        self.task_id = task_id

    async def claim(
        self, replica: DispatcherProcess, worker: str = "hand", key: str = "key"
    ) -> httpx.Response:
        body = {"task_id": self.task_id, "worker_id": worker, "claim_key": key}
        return await self._worker(replica, "task-claim", body)

    async def claimed(self, replica: DispatcherProcess, worker: str = "hand", key: str = "key") -> Answered:
        answer = await self.claim(replica, worker, key)
        assert answer.status_code == 200, answer.text
        claim: Answered = answer.json()
        assert claim["status"] == "Claimed", claim
        return claim

    async def beat(self, replica: DispatcherProcess, claim: Answered) -> httpx.Response:
        return await self._worker(replica, "heartbeat", fence(claim))

    async def complete(self, replica: DispatcherProcess, claim: Answered, **output: Any) -> httpx.Response:
        read = claim["task"]["inputs"][0]
        whole = {"output_index": 0, "start": read["start"], "end": read["end"], "row_count": 0, **output}
        return await self._worker(
            replica, "task-complete", {**fence(claim), "status": "Completed", "outputs": [whole]}
        )

    async def show(self, replica: DispatcherProcess) -> Answered:
        answer = await self._http.get(
            f"{replica.user_url}/v1/tasks/{self.task_id}", headers=replica.user_headers
        )
        assert answer.status_code == 200, answer.text
        shown: Answered = answer.json()
        return shown

    async def becomes(self, replica: DispatcherProcess, status: str, patience: float = 30.0) -> Answered:
        async with asyncio.timeout(patience):
            while True:
                shown = await self.show(replica)
                if shown["status"] == status:
                    return shown
                await asyncio.sleep(0.05)

    async def _worker(self, replica: DispatcherProcess, call: str, body: Answered) -> httpx.Response:
        url = f"{replica.internal_url}/internal/{call}"
        return await self._http.post(url, json=body, headers=replica.worker_headers)


def fence(claim: Answered) -> Answered:
    return {name: claim[name] for name in ("task_id", "attempt", "lease_token")}


@asynccontextmanager
async def open_single_task(
    replica: DispatcherProcess, *, storage: str = "none", start: int = 0, end: int = 9
) -> AsyncIterator[SingleTask]:
    """Deployed and triggered through ``replica``, and queued."""
    async with httpx.AsyncClient(timeout=40.0, trust_env=False) as http:
        headers, user = replica.user_headers, replica.user_url
        answer = await http.post(f"{user}/v1/dags", content=DAG.replace("STORAGE", storage), headers=headers)
        assert answer.status_code == 201, answer.text
        answer = await http.post(
            f"{user}/v1/sources/single/src/trigger", json={"start": start, "end": end}, headers=headers
        )
        assert (answer.status_code, answer.json()["tasks_created"]) == (202, 1), answer.text
        answer = await http.get(f"{user}/v1/tasks", params={"dag": "single"}, headers=headers)
        [task] = answer.json()["tasks"]
        yield SingleTask(http, task["task_id"])
