"""Queues are wake-ups: with the queue gone or emptied, all work still gets done, late."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.support.load import QUEUE, Load
from tests.support.proxies import CuttingProxy
from tests.support.site import Databases, open_site
from tracelake.queue.postgres import PostgresQueue

OBSERVED = 'tracelake_observed_timestamp_seconds{store="%s"}'


async def test_work_accepted_while_the_queue_is_down_is_done_when_it_is_back(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        CuttingProxy(databases.queue_dsn) as proxy,
        open_site(databases, tmp_path, queue_dsn=proxy.dsn) as site,
        Load(site.replicas, databases.queue_dsn, seed=6) as load,
    ):
        await load.trigger(5)
        proxy.refusing = True
        proxy.cut_all()
        await load.trigger(20)
        await site.until_ready(503)
        await databases.until("SELECT bool_or(tries > 1) FROM outbox WHERE failed_at IS NULL")
        url = site.replicas[0].internal_url
        assert await gauge(url, "tracelake_outbox_failed_total") > 0
        async with asyncio.timeout(60):
            # Each is refreshed every five seconds; the state still is.
            while await gauge(url, OBSERVED % "state") - await gauge(url, OBSERVED % "queue") < 8:
                await asyncio.sleep(0.5)
        proxy.refusing = False
        await site.until_ready(200)
        await site.verify(load.ledger)


async def gauge(url: str, name: str) -> float:
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        text = (await http.get(f"{url}/metrics")).text
    [value] = [line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(value)


async def test_an_emptied_queue_costs_time_and_nothing_else(databases: Databases, tmp_path: Path) -> None:
    async with (
        open_site(databases, tmp_path) as site,
        Load(site.replicas, databases.queue_dsn, seed=7) as load,
    ):
        queue = await PostgresQueue.open(databases.queue_dsn)
        try:
            load.begin()
            purged = 0
            working = asyncio.create_task(load.made_progress(80))
            while not working.done():
                purged += await queue.purge(QUEUE)
                await asyncio.wait([working], timeout=0.02)
            await working
        finally:
            await queue.close()
        assert purged > 0
        await load.finish()
        await site.verify(load.ledger)
