"""The driver's side of the worker processes: starts them, hears what they completed, ends them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import orjson
import psutil

from bench.control.stack import Stack
from bench.control.worker import WorkerSettings

PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Done:
    """One completed task: its job, the start of its scope, and when its completion was answered."""

    job: str
    start: int
    at: float


class Fleet:
    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes
        self._done: asyncio.Queue[list[Done]] = asyncio.Queue()
        self._readers = [asyncio.create_task(self._read(process)) for process in processes]

    async def until(self, job: str, count: int) -> list[Done]:
        """Everything completed up to and including the ``count``-th task of ``job``."""
        seen: list[Done] = []
        remaining = count
        async with asyncio.timeout(PATIENCE_SECONDS):
            while remaining > 0:
                batch = await self._done.get()
                seen += batch
                remaining -= sum(done.job == job for done in batch)
        return seen

    def cpu_seconds(self) -> float:
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return float(sum(spent.user + spent.system for spent in times))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            entry = orjson.loads(line)
            if "tasks" in entry:
                self._done.put_nowait([Done(job, start, entry["at"]) for job, start in entry["tasks"]])

    async def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self._processes))
        await asyncio.gather(*self._readers)


@contextlib.asynccontextmanager
async def working(
    stack: Stack, *, processes: int, batch: int, lanes: int, queue: str = "ecs_python"
) -> AsyncIterator[Fleet]:
    settings = WorkerSettings(stack.internal_url, stack.worker_token, stack.queue_dsn, queue, batch, lanes)
    started = [await _start(settings) for _ in range(processes)]
    fleet = Fleet(started)
    try:
        yield fleet
    finally:
        await fleet.end()


async def _start(settings: WorkerSettings) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.control.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(settings) + b"\n")
    await process.stdin.drain()
    if b"ready" not in await process.stdout.readline():
        raise RuntimeError("a worker did not start")
    return process
