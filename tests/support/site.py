"""An installation of a test's own: fresh databases on a durable cluster, Dispatcher replicas on them, and one
task that the test drives itself over HTTP, on a runtime that no worker of the load serves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import httpx

from tests.support.load import Ledger, audit, settled
from tests.support.processes import DispatcherProcess
from tracelake.embedded.postgres import Cluster

# What a Dispatcher says of itself only when something went wrong that it has no answer for.
_ALARMS = {
    "request_failed",
    "loop failed",
    "in-process task crashed",
    "invocation crashed",
    "a part of the dispatcher failed",
}
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


@dataclass(frozen=True, slots=True)
class Databases:
    """DSNs that lead straight to the server."""

    state_dsn: str
    queue_dsn: str

    @classmethod
    def create(cls, cluster: Cluster) -> Databases:
        run = uuid4().hex[:8]
        names = (f"state_{run}", f"queue_{run}")
        for name in names:
            cluster.ensure_database(name)
        return cls(*(cluster.dsn(name) for name in names))

    async def until_past(self, moment: datetime) -> None:
        """Until the state database's clock, which is the one that leases go by, is past ``moment``."""
        await self.until("SELECT tl_now() > $1", moment)

    async def until(self, condition: str, *args: object, patience: float = 30.0) -> None:
        """Until a query of the state database, asked over and over, answers true."""
        connection = await asyncpg.connect(self.state_dsn)
        try:
            async with asyncio.timeout(patience):
                while True:
                    if await connection.fetchval(condition, *args):
                        return
                    await asyncio.sleep(0.05)
        finally:
            await connection.close()


@dataclass(frozen=True, slots=True)
class Site:
    databases: Databases
    replicas: tuple[DispatcherProcess, ...]

    async def until_ready(self, status: int = 200, patience: float = 30.0) -> None:
        """Until ``/readyz`` of every replica answers with ``status``."""
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http, asyncio.timeout(patience):
            for replica in self.replicas:
                while True:
                    if await _readiness(http, replica) == status:
                        break
                    await asyncio.sleep(0.05)

    async def verify(self, ledger: Ledger, patience: float = 60.0) -> None:
        """All work ends by itself, and nothing contradicts the ledger."""
        # A client that vanished amid a transaction keeps its locks until the server ends that.
        await self.until_ready(patience=patience)
        await settled(self.databases.state_dsn, patience)
        alarms = [line for replica in self.replicas for line in alarms_in(replica.log())]
        found = [*await audit(self.databases.state_dsn, ledger), *alarms]
        assert not found, f"{len(found)} contradictions, among them:\n" + "\n".join(found[:20])


async def _readiness(http: httpx.AsyncClient, replica: DispatcherProcess) -> int:
    try:
        return (await http.get(f"{replica.internal_url}/readyz")).status_code
    except httpx.TransportError:
        return 0


def alarms_in(log: str) -> list[str]:
    """Lines of a Dispatcher's log that no fault excuses."""
    found = []
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            if line.strip() and not line.startswith("ready "):
                found.append(line)
            continue
        if not isinstance(entry, dict) or _ALARMS & {entry.get("event"), entry.get("message")}:
            found.append(line[:2000])
    return found


@asynccontextmanager
async def open_site(
    databases: Databases,
    home: Path,
    *,
    state_dsn: str | None = None,
    queue_dsn: str | None = None,
    replicas: int = 2,
    prefix: str = "replica",
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Site]:
    """``state_dsn`` and ``queue_dsn`` are what the replicas are given, when that isn't the straight way."""
    processes = tuple(
        DispatcherProcess(
            home,
            state_dsn=state_dsn or databases.state_dsn,
            queue_dsn=queue_dsn or databases.queue_dsn,
            name=f"{prefix}{number}",
            environment=environment,
        )
        for number in range(replicas)
    )
    try:
        await asyncio.gather(*(process.start() for process in processes))
        yield Site(databases, processes)
    finally:
        for process in processes:
            await process.close()


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

    @asynccontextmanager
    async def beating(self, replica: DispatcherProcess, claim: Answered) -> AsyncIterator[None]:
        """Keeps the lease as a worker does, however long the block takes on a busy machine."""

        async def beat() -> None:
            while True:
                assert (await self.beat(replica, claim)).status_code == 200
                await asyncio.sleep(LEASE_SECONDS / 8)

        async with asyncio.TaskGroup() as group:
            beats = group.create_task(beat())
            yield
            beats.cancel()

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
