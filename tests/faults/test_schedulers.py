"""Schedulers and Dispatchers die, stand still and come back: each tick of a cron source exists once, and
metrics say when no scheduler acts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx

from tests.support.conversation import SQL
from tests.support.processes import DispatcherProcess, SchedulerProcess
from tests.support.proxies import Forwarder
from tests.support.site import Databases, open_site
from tracelake.contracts.sources import SCHEDULER_LEASE_SECONDS

DAG = """
name: clock
jobs:
  - name: minute
    activation: source
    source: { kind: cron, schedule: "* * * * *", catch_up: all }
    outputs: 1
  - name: seen
    activation: reactive
    runtime: dispatcher
    operator: noop
    inputs: [{ from: { job: minute } }]
    outputs: 1
"""
EVENTS = """SELECT coalesce(array_agg(e.range_end ORDER BY e.event_id), '{}')
            FROM event e JOIN dataset_version USING (dataset_version) JOIN job j USING (job_id)
            WHERE j.name = 'minute'"""
READ = """SELECT coalesce(max(cc.cursor), -1) >= $1 FROM consumer_cursor cc JOIN job USING (job_id)
          WHERE name = 'seen'"""
ACTS = "SELECT EXISTS (SELECT 1 FROM scheduler_lease WHERE holder = $1 AND expires_at > tl_now())"
TASKS = "SELECT count(*) FROM task JOIN job USING (job_id) WHERE name = 'seen'"


class Clock:
    """The state database's, which the test owns; it stands ten seconds past a minute at first."""

    def __init__(self, databases: Databases, connection: asyncpg.Connection) -> None:
        self._databases = databases
        self._connection = connection

    async def own(self) -> None:
        await self._connection.execute(SQL.own_clock)
        second = await self._connection.fetchval("SELECT extract(second FROM tl_now())::int")
        await self._connection.fetch(SQL.advance_clock, float(70 - second))

    async def minute(self) -> int:
        now: int = await self._connection.fetchval("SELECT extract(epoch FROM tl_now())::bigint")
        return now // 60 * 60

    async def advance(self, seconds: float) -> int:
        await self._connection.fetch(SQL.advance_clock, seconds)
        return await self.minute()

    async def seen(self, tick: int) -> None:
        await self._databases.until(READ, tick)

    async def events(self) -> list[int]:
        return list(await self._connection.fetchval(EVENTS))

    async def value(self, sql: str) -> int:
        found: int = await self._connection.fetchval(sql)
        return found


async def deploy(replica: DispatcherProcess) -> None:
    async with httpx.AsyncClient(base_url=replica.user_url, headers=replica.user_headers, timeout=30) as http:
        answer = await http.post("/v1/dags", content=DAG)
        assert answer.status_code == 201, answer.text


@asynccontextmanager
async def owned_clock(databases: Databases) -> AsyncIterator[Clock]:
    connection = await asyncpg.connect(databases.state_dsn)
    try:
        clock = Clock(databases, connection)
        await clock.own()
        yield clock
    finally:
        await connection.close()


async def test_each_tick_exists_once_whatever_dies(databases: Databases, tmp_path: Path) -> None:
    async with (
        open_site(databases, tmp_path, replicas=1) as site,
        owned_clock(databases) as clock,
        Forwarder(site.replicas[0].internal_url) as way,
    ):
        [replica] = site.replicas
        await deploy(replica)
        first = await clock.minute()
        token = replica.worker_headers["X-Trace-Worker-Token"]
        one, two = (
            SchedulerProcess(tmp_path, internal_url=way.url, worker_token=token, name=name)
            for name in ("one", "two")
        )
        try:
            await one.start()
            # One tick becomes one event, and one task downstream, which runs.
            await clock.seen(await clock.advance(60))
            assert await clock.events() == [first + 60]
            assert await clock.value(TASKS) == 1
            # Beside a second one; the one that acts is killed, and the other takes its place.
            await two.start()
            await one.kill()
            await clock.advance(60)
            await clock.seen(await clock.advance(60))
            # One that stands still, and goes on when another has long acted.
            two.send(signal.SIGSTOP)
            await one.start()
            await clock.seen(await clock.advance(120))
            two.send(signal.SIGCONT)
            await clock.seen(await clock.advance(60))
            # The Dispatcher is killed in the middle; what it missed is made up for.
            await replica.kill()
            await clock.advance(180)
            await replica.start()
            way.lead_to(replica.internal_url)
            await clock.seen(await clock.advance(60))
            # Connections break between a tick and its answer, over and over.
            for _ in range(3):
                await clock.advance(60)
                way.cut()
                way.lead_to(replica.internal_url)
            last = await clock.advance(60)
            await clock.seen(last)
            # Set back by a day: nothing comes again, and from where it was it goes on.
            await clock.advance(-86_400)
            await clock.advance(43_200)
            last = await clock.advance(43_200 + 60)
            await clock.seen(last)
            assert await clock.events() == [*range(first + 60, last, 60), last]
            # One that is asked to stop lets the other act at once.
            one.send(signal.SIGTERM)
            assert await one.ended() == 0
            await databases.until(ACTS, "two")
        finally:
            await one.close()
            await two.close()


async def shows(one: SchedulerProcess, acting: int) -> None:
    [served] = await one.logged("metrics_served")
    async with httpx.AsyncClient(timeout=30) as http, asyncio.timeout(SCHEDULER_LEASE_SECONDS + 20):
        while f"tracelake_scheduler_acting {acting}.0\n" not in (await http.get(served["url"])).text:
            assert one.exit_code is None, one.log()
            await asyncio.sleep(0.2)


async def test_no_scheduler_is_shown_to_act_while_the_dispatcher_is_away(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        open_site(databases, tmp_path, replicas=1) as site,
        Forwarder(site.replicas[0].internal_url) as way,
    ):
        [replica] = site.replicas
        token = replica.worker_headers["X-Trace-Worker-Token"]
        one = SchedulerProcess(tmp_path, internal_url=way.url, worker_token=token, name="one")
        try:
            one.launch()
            await shows(one, 1)
            way.cut()
            await shows(one, 0)
            way.lead_to(replica.internal_url)
            await shows(one, 1)
            replica.stop()
            await shows(one, 0)
            replica.resume()
            await shows(one, 1)
        finally:
            replica.resume()
            await one.close()
