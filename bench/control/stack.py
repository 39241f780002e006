"""The system under test: ``tracelake dispatcher`` on a home of its own, with its embedded Postgres."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import psutil

from bench.control.connection import Connection
from tracelake.dev.home import QUEUE_DATABASE, STATE_DATABASE, Home
from tracelake.embedded.postgres.folder import ClusterFolder

SOURCE_RUNTIME = "bench_source"
START_SECONDS = 60


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far, by kind of process."""

    dispatcher: float
    postgres: float

    def since(self, before: Usage) -> Usage:
        return Usage(self.dispatcher - before.dispatcher, self.postgres - before.postgres)


class Stack:
    def __init__(self, home: Path, ready: dict[str, Any], started_in: float) -> None:
        self.home = Home(home)
        self.started_in = started_in
        self.internal_url: str = ready["internal_url"]
        self.user_url: str = ready["user_url"]
        self.worker_token: str = ready["worker_token"]
        self._user_token: str = ready["user_token"]
        self._dispatcher = psutil.Process(ready["pid"])

    @property
    def state_dsn(self) -> str:
        password = ClusterFolder(self.home.state_cluster).password("postgres") or ""
        return self._dsn("postgres", password, STATE_DATABASE)

    @property
    def queue_dsn(self) -> str:
        """As a worker gets it: for the role that can use the queue and nothing else."""
        return self._dsn("tracelake_queue", self.home.secrets().queue_password, QUEUE_DATABASE)

    def _dsn(self, role: str, password: str, database: str) -> str:
        port = ClusterFolder(self.home.state_cluster).remembered_port()
        return f"postgresql://{role}:{quote(password, '')}@127.0.0.1:{port}/{database}"

    def worker_environment(self) -> dict[str, str]:
        """The environment of a worker: no database but the queue's."""
        return {
            "TRACELAKE_INTERNAL_URL": self.internal_url,
            "TRACELAKE_WORKER_TOKEN": self.worker_token,
            "TRACELAKE_QUEUE_DSN": self.queue_dsn,
            "TRACELAKE_OBJECTS": str(self.home.objects),
        }

    async def user(self) -> Connection:
        return await Connection.open(self.user_url, Authorization=f"Bearer {self._user_token}")

    async def worker(self) -> Connection:
        return await Connection.open(self.internal_url, X_Trace_Worker_Token=self.worker_token)

    def _postgres(self) -> list[psutil.Process]:
        processes: list[psutil.Process] = self._dispatcher.children(recursive=True)
        return processes

    def usage(self) -> Usage:
        return Usage(_cpu([self._dispatcher]), _cpu(self._postgres()))

    def memory(self) -> dict[str, float]:
        """Resident MiB; for Postgres, whose processes share memory, what is proportionally theirs."""
        shares = [_proportional(process) for process in self._postgres()]
        return {
            "dispatcher_rss_mib": round(self._dispatcher.memory_info().rss / 2**20, 1),
            "postgres_pss_mib": round(sum(shares) / 2**20, 1),
            "postgres_processes": len(shares),
        }


def _cpu(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            spent = process.cpu_times()
            total += spent.user + spent.system
    return total


def _proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


@contextlib.asynccontextmanager
async def running(home: Path, settings: Mapping[str, str] | None = None) -> AsyncIterator[Stack]:
    """The Dispatcher from its command line, until it answers on both ports; stopped by SIGTERM."""
    ready_file = _prepare(home)
    command = ["-m", "tracelake", "dispatcher", "--home", str(home), "--ready-file", str(ready_file)]
    command += ["--user-port", "0", "--internal-port", "0", "--runtime", f"{SOURCE_RUNTIME}={SOURCE_RUNTIME}"]
    began = time.monotonic()
    with (home / "dispatcher.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**without_settings(os.environ), **(settings or {})},
        )
    try:
        while not ready_file.exists():
            if process.returncode is not None or time.monotonic() - began > START_SECONDS:
                raise RuntimeError(f"the Dispatcher did not start, see {home / 'dispatcher.log'}")
            await asyncio.sleep(0.005)
        yield Stack(home, orjson.loads(ready_file.read_bytes()), time.monotonic() - began)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


def _prepare(home: Path) -> Path:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    ready_file = home / "ready.json"
    ready_file.unlink(missing_ok=True)
    return ready_file


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings that would point a process at another database."""
    return {name: value for name, value in environment.items() if not name.startswith("TRACELAKE_")}
