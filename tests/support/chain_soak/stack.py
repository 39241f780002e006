"""The stack of a soak, and a watch over its hot tables.

Two workers serve the follower's runtime, so that one can always take over. The watch reads the hot tables all
the time: a reader sees one chain, and no row of another one.
"""

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

import psycopg
from psycopg import IsolationLevel, sql

from tests.support.dev_stack import DevStack, descendants, is_gone
from tracelake.client import Client
from tracelake.domain.errors import TracelakeError
from tracelake.postgres import sqlfiles

_LOOK_SECONDS = 0.1
_REFUSED = b"a newer attempt has begun on these blocks"
T = TypeVar("T")
_SQL = sqlfiles.load("tests.support.chain_soak", "watch.sql")
_OF_BLOCKS = ("hot_transactions", "hot_logs")


DAG, FOLLOWER = "soak", "follower"


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
        return self._dev.handle.data_owner_dsn

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


class Watch:
    """``looks`` counts those that found tables to look at."""

    def __init__(self, stack: SoakStack, client: Client) -> None:
        self._stack = stack
        self._tables = {name: _table(client, name) for name in ("hot_blocks", *_OF_BLOCKS)}
        self.looks = 0
        self.wrong: list[str] = []

    def look(self) -> None:
        """All of it in one snapshot; nothing while the database is away, or before the first commit."""
        away = suppress(psycopg.OperationalError, psycopg.errors.UndefinedTable)
        with away, psycopg.connect(self._stack.data_dsn, connect_timeout=2) as data:
            data.isolation_level = IsolationLevel.REPEATABLE_READ
            self._look(data)

    def _look(self, data: psycopg.Connection) -> None:
        blocks = self._tables["hot_blocks"]
        broken = data.execute(sql.SQL(_SQL.broken_links).format(blocks=blocks)).fetchall()
        self.wrong += [
            f"while it ran: hot blocks: {number} doesn't follow the one before" for (number,) in broken
        ]
        for name in _OF_BLOCKS:
            statement = sql.SQL(_SQL.strays).format(blocks=blocks, rows=self._tables[name])
            strays = data.execute(statement).fetchall()
            self.wrong += [
                f"while it ran: {name}: rows of a block {number} that isn't stored" for (number,) in strays
            ]
        self.looks += 1


def _table(client: Client, name: str) -> sql.Identifier:
    return sql.Identifier("data", f"d_{client.dataset(name).dataset_version.hex}")
