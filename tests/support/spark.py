"""A real Spark for tests: one embedded Connect server for all tests that run in one process.

Tests that use it are put into one xdist group, so that a run starts one server however many processes it has.
``LocalPrograms`` replaces the operator host where only a program has to be started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.kernel import parent_death_hook
from tracelake.trees import remove_if_possible
from tracelake.worker.spark.server import SparkServer
from tracelake.worker.spark.settings import SparkSettings

T = TypeVar("T")

GROUP = "spark"
# A test's queries are small: what counts is how soon the server is there.
QUICK = SparkSettings(
    master="local[2]",
    java_options=("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
    conf={
        "spark.sql.shuffle.partitions": "2",
        "spark.connect.execute.reattachable.senderMaxStreamDuration": "1s",
        "spark.connect.execute.manager.detachedTimeout": "1s",
        "spark.connect.execute.manager.maintenanceInterval": "1s",
    },
)


class LocalProgram:
    """A child process of the test; whatever it started ends with it."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def account(self) -> None:
        return None

    async def grant(self, writes: Sequence[str]) -> None:
        """It sees everything."""

    async def withdraw(self, writes: Sequence[str], *, force: bool = False) -> list[str]:
        return []

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.wait()

    async def wait(self) -> int:
        status = await self._process.wait()
        remove_if_possible(self._folder)
        return status


class LocalPrograms:
    """Starts programs as the operator host does, without changing identity or view."""

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
    ) -> LocalProgram:
        remove_if_possible(folder)
        os.makedirs(folder, mode=0o700)
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(env),
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=parent_death_hook(signal.SIGINT),
        )
        return LocalProgram(process, folder)


class SharedSpark:
    """A server with a thread and an event loop of its own, since each test has its own loop."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="spark", daemon=True)
        self._thread.start()
        self.folder = folder / "spark"
        self.log = folder / "spark.log"
        self.server = SparkServer(QUICK, LocalPrograms(), self.folder, log=self.log)
        self.run(self.server.start())

    @property
    def target(self) -> SparkTarget:
        return self.server.target

    @property
    def pid(self) -> int:
        return self.server.pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def unsupervised(target: SparkTarget) -> SparkTarget:
    """The same server, as one that another user runs."""
    return SparkTarget(url=target.url.partition("/;")[0], token=target.token)


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSpark]:
    spark = SharedSpark(tmp_path_factory.mktemp("spark"))
    yield spark
    spark.close()


@pytest.fixture(scope="session")
def spark_target(shared_spark: SharedSpark) -> SparkTarget:
    return shared_spark.target


# Before xdist looks for groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "shared_spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(GROUP))
