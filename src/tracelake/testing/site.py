"""An installation of a test's own: fresh databases on a durable cluster, and Dispatcher replicas on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

import asyncpg
import httpx

from tracelake.embedded_postgres import Cluster
from tracelake.testing.caller import Ledger
from tracelake.testing.dispatcher_process import DispatcherProcess
from tracelake.testing.load_audit import audit, settled

# What a Dispatcher says of itself only when something went wrong that it has no answer for.
_ALARMS = {
    "request_failed",
    "loop failed",
    "in-process task crashed",
    "hand-over crashed",
    "a part of the dispatcher failed",
}


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
        await self.until_ready()
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
