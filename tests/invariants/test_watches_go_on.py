"""Who watches over a worker's parts goes on whatever happens to it; a watch that ends ends the worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.spark import QUICK, LocalPrograms
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Unavailable
from tracelake.worker import app
from tracelake.worker.app import Background
from tracelake.worker.host import operator_pool
from tracelake.worker.host.client import HostSpec
from tracelake.worker.host.operator_pool import OperatorPool, OperatorSupply
from tracelake.worker.spark import server as spark_server
from tracelake.worker.spark.server import SparkServer

WITHIN = 20.0


class Deep(RecursionError):
    """What nobody thought of."""


async def test_spark_is_started_again_whatever_its_last_life_ended_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = asyncio.Event()

    class Life:
        lives = 0

        @classmethod
        async def begin(cls, *_: object) -> Life:
            cls.lives += 1
            if cls.lives == 2:
                raise Deep("can't begin")
            if cls.lives == 3:
                again.set()
            return cls()

        @property
        def target(self) -> Any:
            return type("Target", (), {"url": "sc://nowhere"})

        async def over(self, _: float) -> str:
            if Life.lives == 3:
                await asyncio.Event().wait()
            raise Deep("can't be watched")

        async def end(self) -> None:
            raise Deep("can't be tidied")

    monkeypatch.setattr(spark_server, "SparkServerRun", Life)
    monkeypatch.setattr(spark_server, "_RESTART_BACKOFF", Backoff(0.001, 0.001))
    server = SparkServer(QUICK, LocalPrograms(), tmp_path / "spark")
    await server.start()
    async with asyncio.timeout(WITHIN):
        watching = asyncio.create_task(server.watch())
        await again.wait()
    assert not watching.done()
    watching.cancel()


async def test_a_host_is_started_again_whatever_kept_the_last_one_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def fails(_: HostSpec) -> None:
        tried.append(1)
        raise Deep("no host")

    monkeypatch.setattr(operator_pool.OperatorHost, "start", fails)
    monkeypatch.setattr(operator_pool, "_HOST_BACKOFF", Backoff(0.001, 0.001))
    supply = OperatorSupply(HostSpec(home=None, object_root=tmp_path, work_folder=tmp_path), 1)
    watching = asyncio.create_task(supply.watch())
    async with asyncio.timeout(WITHIN):
        while len(tried) < 3:
            await asyncio.sleep(0.001)
    assert not watching.done()
    watching.cancel()


async def test_a_pool_goes_on_whatever_kept_a_process_from_starting() -> None:
    class Host:
        sealed = True

        def __init__(self) -> None:
            self.operators: dict[str, str | None] = {}
            self.failed: dict[str, str] = {}

        async def died(self) -> None:
            await asyncio.Event().wait()

        def has_ended(self) -> bool:
            return False

        async def spawn(self, _: str | None) -> None:
            raise Deep("no process")

    host: Any = Host()
    pool = OperatorPool(host, 1)
    async with asyncio.timeout(WITHIN):
        for _ in range(2):
            with pytest.raises(Unavailable, match="no process"):
                await pool.take()
    await pool.close()


async def test_logs_are_swept_again_after_a_sweep_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = []

    def fails(_: Path) -> int:
        swept.append(1)
        raise Deep("no sweep")

    monkeypatch.setattr(app, "sweep_logs", fails)
    monkeypatch.setattr(app, "_SWEEP_SECONDS", 0.001)
    sweeping = asyncio.create_task(app._keep_logs_small(tmp_path))
    async with asyncio.timeout(WITHIN):
        while len(swept) < 3:
            await asyncio.sleep(0.001)
    assert not sweeping.done()
    sweeping.cancel()


async def test_a_watch_that_ends_is_told_to_who_waits_for_it() -> None:
    async def ends() -> None:
        raise Deep("for good")

    background = Background()
    background.check()
    async with background.running("the watch over Spark", ends()):
        async with asyncio.timeout(WITHIN):
            await background.ended()
        with pytest.raises(Unavailable, match="the watch over Spark has ended: Deep: for good"):
            background.check()


async def test_a_worker_whose_watch_has_ended_stops_taking_work(monkeypatch: pytest.MonkeyPatch) -> None:
    drained = []

    class Heartbeats:
        def close(self) -> None: ...

    class WakeUps:
        async def close(self, seconds: float) -> None: ...

    class Wrapper:
        heartbeats, wake_ups = Heartbeats(), WakeUps()

        async def poll(self, stop: asyncio.Event) -> None:
            await stop.wait()

        async def run_attempts(self) -> None:
            await asyncio.Event().wait()

    class Settings:
        concurrency, drain_seconds = 1, 1.0

    async def drain(*_: object) -> None:
        drained.append(1)

    async def ends() -> None:
        raise Deep("for good")

    monkeypatch.setattr(app, "drain", drain)
    background, stop = Background(), asyncio.Event()
    async with asyncio.timeout(WITHIN), background.running("the watch", ends()):
        serving: Any = app._serve
        await serving(Wrapper(), Settings(), stop, asyncio.Event(), background)
    assert (drained, stop.is_set()) == ([1], True)
