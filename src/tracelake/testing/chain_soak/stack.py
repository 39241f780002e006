"""The stack of a soak: two workers for what the follower runs on, so that there is always one to take over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from tracelake.client import Client
from tracelake.domain.errors import TracelakeError
from tracelake.testing.dev_stack import DevStack, descendants, is_gone

DAG, FOLLOWER = "soak", "follower"
_LOOK_SECONDS = 0.1
_REFUSED = b"a newer attempt has begun on these blocks"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Of the follower: how far it is, and the worker that runs it."""

    task_id: UUID
    number: int
    pid: int
    tip: int


class SoakStack:
    def __init__(self, folder: Path, pools: Path) -> None:
        self._folder = folder
        self._pools = pools
        self._second: subprocess.Popen[bytes] | None = None
        self._dev = DevStack(folder / "home", folder, "--rpc-pools", str(pools), workers=True)

    def until_ready(self) -> None:
        self._dev.until_ready()
        self.keep_second_worker()

    def close(self) -> None:
        if self._second is not None:
            self._second.kill()
            self._second.wait()
        self._dev.close()

    def keep_second_worker(self) -> None:
        """The first one is started again by the stack itself."""
        if self._second is not None and self._second.poll() is None:
            return
        command = [sys.executable, "-m", "tracelake", "worker", "--runtime", "ecs_python"]
        with (self._folder / "second-worker").open("ab") as output:
            self._second = subprocess.Popen(
                [*command, "--home", str(self._folder / "home")],
                env={**os.environ, "TRACELAKE_RPC_POOLS": str(self._pools)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def client(self) -> Client:
        handle = self._dev.handle
        return Client(handle.user_url, handle.user_token)

    @property
    def data_dsn(self) -> str:
        return self._dev.handle.data_dsn

    def pid(self, part: str) -> int | None:
        """None while it is away."""
        handle = self._dev.find_handle()
        pid = handle.pids.get(part) if handle is not None else None
        return None if pid is None or is_gone(pid) else pid

    def below(self, part: str) -> list[int]:
        pid = self.pid(part)
        return descendants(pid) if pid is not None else []

    def follower(self) -> Attempt | None:
        """The attempt that follows the chain; None while there is none, or nobody who knows."""
        with suppress(TracelakeError), self.client() as client:
            for task in client.tasks(dag=DAG, job=FOLLOWER, status="Running").tasks:
                last = client.task(task.task_id).attempts[0]
                pid, tip = _pid_of(last.worker_id), (last.progress or {}).get("tip")
                if tip is not None and pid in self._python_workers():
                    return Attempt(task.task_id, last.attempt, pid, tip)
        return None

    def derived_upto(self) -> int:
        """The last block of what is made of blocks that aren't final yet; -1 while there is nothing."""
        with suppress(TracelakeError), self.client() as client:
            parts = client.partitions("collectibles", limit=1000).partitions
            return parts[-1].end if parts else -1
        return -1

    def _python_workers(self) -> list[int]:
        """Those that are there."""
        first, second = self.pid("worker-ecs_python"), self._second
        found = [] if first is None else [first]
        return found if second is None or second.poll() is not None else [*found, second.pid]

    def commits_refused(self) -> int:
        """How often the data database turned an attempt away that wasn't the newest any more."""
        return (self._folder / "home" / "postgres" / "data" / "server.log").read_bytes().count(_REFUSED)


def within(seconds: float, look: Callable[[], T | None]) -> T | None:
    """The first answer of ``look`` that is neither None nor False; None when time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := look():
            return found
        time.sleep(_LOOK_SECONDS)
    return None


@contextmanager
def running_stack(folder: Path, pools: Path) -> Iterator[SoakStack]:
    stack = SoakStack(folder, pools)
    try:
        stack.until_ready()
        yield stack
    finally:
        stack.close()


def _pid_of(worker_id: str) -> int:
    """A worker's name ends with its process id and something random."""
    return int(worker_id.rpartition(":")[2].partition("-")[0])
