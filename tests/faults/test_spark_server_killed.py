"""The Spark server dies or hangs: what ran on it hears so at once, and a new one takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from tests.support.spark import GROUP, QUICK, LocalProgram, LocalPrograms
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import Unavailable
from tracelake.worker.spark import session as spark_session
from tracelake.worker.spark.server import SparkServer

pytestmark = [
    pytest.mark.xdist_group(GROUP),
    pytest.mark.filterwarnings("ignore:.*RETRIES_EXCEEDED"),
]


class Unreliable(LocalPrograms):
    """Fails to start anything as often as it is told to."""

    def __init__(self) -> None:
        self.failures = 0
        self.starts = 0

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
    ) -> LocalProgram:
        self.starts += 1
        if self.failures:
            self.failures -= 1
            raise Unavailable("HostGone", "no program was started")
        return await super().start_program(argv, env, log=log, folder=folder)


async def test_a_killed_server_is_lost_at_once_and_replaced(tmp_path: Path) -> None:
    host = Unreliable()
    async with supervised(tmp_path, host) as server:
        first, generation, pid = server.target, server.generation, server.pid
        query = asyncio.create_task(asyncio.to_thread(run_for_ever, first))
        lost = asyncio.create_task(server.lost(generation))
        await asyncio.sleep(0)
        assert not lost.done()
        host.failures = 1

        os.kill(pid, signal.SIGKILL)

        await lost
        with pytest.raises(PySparkException):
            await query
        second = await server.ready()
        assert server.generation == generation + 1
        assert host.starts == 3
        assert (second.token != first.token, server.pid != pid) == (True, True)
        assert await server.healthy()
        await server.lost(generation)
        assert await asyncio.to_thread(select_one, second) == 1
        await server.interrupt("of the first generation", 1, 1)


async def test_a_server_that_hangs_is_lost_and_replaced(tmp_path: Path) -> None:
    async with supervised(tmp_path, LocalPrograms(), hangs_after=3.0) as server:
        generation, pid = server.generation, server.pid

        os.kill(pid, signal.SIGSTOP)

        await server.lost(generation)
        await server.ready()
        assert server.generation == generation + 1
        assert not Path(f"/proc/{pid}").exists()


@asynccontextmanager
async def supervised(
    folder: Path, host: LocalPrograms, *, hangs_after: float = 60.0
) -> AsyncIterator[SparkServer]:
    server = SparkServer(QUICK, host, folder / "spark", hangs_after=hangs_after)
    await server.start()
    watching = asyncio.create_task(server.watch())
    try:
        yield server
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await server.stop()


def run_for_ever(target: SparkTarget) -> None:
    work = spark_session.begin(spark_session.open_session(target), str(uuid.uuid4()), 1, 1)
    try:
        work.session.range(0, 10**17, 1, 2).selectExpr("sum(id % 7)").collect()
    finally:
        work.end()


def select_one(target: SparkTarget) -> int:
    work = spark_session.begin(spark_session.open_session(target), str(uuid.uuid4()), 1, 1)
    value = work.session.sql("select 1").collect()[0][0]
    work.end()
    return int(value)
