"""What a publish was answered for reaches the queue, whatever dies between the commit and the delivery."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx

from tests.support.processes import DispatcherProcess
from tests.support.proxies import CuttingProxy
from tests.support.site import Databases, alarms_in, open_site
from tracelake.contracts.buffers import buffer_queue
from tracelake.queue.postgres import PostgresQueue

DAG = """
name: chain
jobs:
  - { name: src, activation: source, runtime: ecs_python, operator: noop, source: { kind: always_on }, outputs: 1 }
publish:
  alerts: { storage: postgres, write_mode: buffered, schema: { columns: { key: text }, unique: [key] } }
"""


async def claimed(http: httpx.AsyncClient, replica: DispatcherProcess) -> tuple[dict[str, Any], UUID]:
    """A running task of a DAG with a buffered dataset, and the dataset."""
    deployed = await http.post(f"{replica.user_url}/v1/dags", content=DAG, headers=replica.user_headers)
    [buffer] = deployed.json()["buffers"]
    tasks = await http.get(f"{replica.user_url}/v1/tasks?job=src", headers=replica.user_headers)
    body = {"task_id": tasks.json()["tasks"][0]["task_id"], "worker_id": "w"}
    url = f"{replica.internal_url}/internal/task-claim"
    return (await http.post(url, json=body, headers=replica.worker_headers)).json(), UUID(
        buffer["dataset_uuid"]
    )


async def publish(
    http: httpx.AsyncClient, replica: DispatcherProcess, claim: dict[str, Any], key: str
) -> str | None:
    """The batch that was accepted; None when nobody answered."""
    fence = {name: claim[name] for name in ("task_id", "attempt", "lease_token")}
    try:
        answer = await http.post(
            f"{replica.internal_url}/v1/task/buffer-publish",
            json={**fence, "dataset": "alerts", "records": [{"key": key}]},
            headers={"X-Trace-Task-Capability": claim["capability_token"]},
        )
    except httpx.TransportError:
        return None
    assert answer.status_code == 200, answer.text
    return str(answer.json()["batch_id"])


async def delivered(databases: Databases, dataset: UUID, wanted: set[str]) -> list[str]:
    """The batches in the queue, once all that are wanted are there."""
    queue = await PostgresQueue.open(databases.queue_dsn)
    found: list[str] = []
    try:
        async with asyncio.timeout(30):
            while not wanted <= set(found):
                messages = await queue.receive(buffer_queue(dataset), max_messages=100, wait_seconds=1.0)
                found += [message.body["batch_id"] for message in messages]
                await queue.ack([message.receipt for message in messages])
    finally:
        await queue.close()
    return found


async def test_batches_accepted_while_the_queue_was_down_survive_the_dispatcher_that_took_them(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        CuttingProxy(databases.queue_dsn) as proxy,
        open_site(databases, tmp_path, queue_dsn=proxy.dsn, replicas=1) as site,
        httpx.AsyncClient(timeout=10.0, trust_env=False) as http,
    ):
        [replica] = site.replicas
        claim, dataset = await claimed(http, replica)
        proxy.refusing = True
        proxy.cut_all()
        accepted = {await publish(http, replica, claim, f"k{n}") for n in range(5)}
        await databases.until("SELECT bool_or(tries > 0) FROM outbox WHERE kind = 'buffer'")
        await replica.kill()
        proxy.refusing = False
        await replica.start()
        assert set(await delivered(databases, dataset, {str(batch) for batch in accepted})) == accepted
        assert alarms_in(replica.log()) == []


async def test_batches_of_a_dispatcher_that_is_killed_while_it_publishes_are_all_delivered(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path, replicas=1) as site,
        httpx.AsyncClient(timeout=10.0, trust_env=False) as http,
    ):
        [replica] = site.replicas
        claim, dataset = await claimed(http, replica)
        accepted: set[str] = set()
        for round_no in range(2):
            publishing = [
                asyncio.create_task(publish(http, replica, claim, f"k{round_no}-{n}")) for n in range(40)
            ]
            await asyncio.wait(publishing, return_when=asyncio.FIRST_COMPLETED)
            await replica.kill()
            accepted |= {batch for batch in await asyncio.gather(*publishing) if batch is not None}
            await replica.start()
        assert accepted
        assert set(await delivered(databases, dataset, accepted)) >= accepted
        await databases.until("SELECT count(*) = 0 FROM outbox WHERE kind = 'buffer'")
