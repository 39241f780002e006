"""The workers under measurement: ``tracelake worker``, as people run it, observed by their logs.

A worker logs a line when a completion has been answered, with the time. Reading it there costs the measured
processes nothing, and no worker has to be built for the benchmark.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import orjson
import psutil

from bench.control.stack import Stack, without_settings

PATIENCE_SECONDS = 120
_LOOK_SECONDS = 0.002
_REPORTED = (b'"attempt_reported"', b'"function_ended"')


@dataclass(frozen=True)
class Done:
    """One attempt whose completion was answered: its job, and when, in seconds since the epoch."""

    job: str
    at: float


class _Log:
    """A worker's log, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def new(self) -> list[Done]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [_done(orjson.loads(line)) for line in lines if any(word in line for word in _REPORTED)]


class Fleet:
    def __init__(self, processes: list[asyncio.subprocess.Process], logs: list[Path]) -> None:
        self._processes = processes
        self._logs = [_Log(path) for path in logs]

    async def until(self, job: str, count: int) -> list[Done]:
        """Everything that ended up to and including the ``count``-th attempt of ``job`` from here on."""
        seen: list[Done] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sum(done.job == job for done in seen) < count:
                found = [done for log in self._logs for done in log.new()]
                seen += found
                if not found:
                    await asyncio.sleep(_LOOK_SECONDS)
        return seen

    def cpu_seconds(self) -> float:
        """CPU time of the wrappers and their descendants, including ended ones: operator processes retire."""
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                spent = process.cpu_times()
                total += spent.user + spent.system + spent.children_user + spent.children_system
        return total

    def memory_mib(self) -> float:
        """Memory by PSS, since operator processes share most of it."""
        shares = 0
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                shares += process.memory_full_info().pss
        return round(shares / 2**20, 1)

    def _family(self) -> list[psutil.Process]:
        wrappers = [psutil.Process(process.pid) for process in self._processes]
        return [*wrappers, *(child for wrapper in wrappers for child in wrapper.children(recursive=True))]

    async def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in self._processes))


@contextlib.asynccontextmanager
async def working(
    stack: Stack,
    *,
    processes: int,
    runtime: str = "ecs_python",
    concurrency: int = 2,
    operators: Path | None = None,
) -> AsyncIterator[Fleet]:
    """Ready workers, until the end of the block."""
    folder = stack.home.folder
    logs = [folder / f"worker-{runtime}-{number}.log" for number in range(processes)]
    options = ["--runtime", runtime, "--concurrency", str(concurrency), "--home", str(folder)]
    if operators is not None:
        options += ["--operators", str(operators)]
    started = await asyncio.gather(*(_start(stack, options, log) for log in logs))
    fleet = Fleet(list(started), logs)
    try:
        yield fleet
    finally:
        await fleet.end()


async def _start(stack: Stack, options: list[str], log: Path) -> asyncio.subprocess.Process:
    ready_file = log.with_suffix(".pid")
    ready_file.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tracelake", "worker", *options, "--ready-file", str(ready_file)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**without_settings(os.environ), **stack.worker_environment()},
        )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ready_file.exists():
        if process.returncode is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a worker did not start, see {log}")
        await asyncio.sleep(0.01)
    return process


def _done(entry: dict[str, str]) -> Done:
    return Done(entry["job"], datetime.fromisoformat(entry["timestamp"]).timestamp())
