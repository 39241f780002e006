"""``WorkerScene``: a Dispatcher, a worker and a user who deploys, triggers and looks. ``BackfillScene`` adds a
DAG to backfill and the command that does it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.dev_stack import eventually, tracelake
from tests.support.postgres import SharedPostgres
from tests.support.processes import DispatcherProcess, WorkerProcess
from tests.support.site import Databases
from tracelake.client import Client
from tracelake.contracts.user_api import TaskDetail, TaskSummary

ENDED = ("Completed", "Failed", "Canceled")
MANUAL_SOURCE: Mapping[str, Any] = {
    "name": "src",
    "activation": "source",
    "runtime": "dispatcher",
    "source": {"kind": "manual"},
    "outputs": 1,
}
CHUNK = 10


@dataclass(slots=True)
class WorkerScene:
    databases: Databases
    folder: Path
    replica: DispatcherProcess
    client: Client
    _clients: ExitStack

    def worker(
        self,
        name: str,
        *options: str,
        queue_dsn: str | None = None,
        internal_url: str | None = None,
        runtime: str = "ecs_python",
        **environment: str,
    ) -> WorkerProcess:
        """One that isn't started yet, with a home of its own."""
        return WorkerProcess(
            self.folder / name,
            internal_url=internal_url or self.replica.internal_url,
            worker_token=self.replica.worker_headers["X-Trace-Worker-Token"],
            queue_dsn=queue_dsn or self.databases.queue_dsn,
            object_root=self.folder / "dispatcher" / "objects",
            runtime=runtime,
            name=name,
            options=options,
            environment=environment,
        )

    @contextmanager
    def working(self, name: str, *options: str, **more: Any) -> Iterator[WorkerProcess]:
        worker = self.worker(name, *options, **more)
        try:
            asyncio.run(worker.start())
            yield worker
        finally:
            asyncio.run(worker.close())

    def deploy(self, dag: str, operator: str, *, more: Sequence[Any] = (), **fields: Any) -> None:
        """A source, one job of the operator that gets a task for each range, and ``more`` jobs."""
        job = {
            "name": "work",
            "activation": "reactive",
            "runtime": "ecs_python",
            "operator": operator,
            "inputs": [{"from": {"job": "src", "output": 0}}],
            "outputs": [{"name": "out", "storage": "none"}],
            "execution_strategy": "PerPartition",
            "retry": {"base": 0, "max": 1},
            **fields,
        }
        self.client.deploy(json.dumps({"name": dag, "jobs": [MANUAL_SOURCE, job, *more]}).encode())

    def deploy_source(self, dag: str, operator: str, **fields: Any) -> None:
        """One that always runs, as the DAG's only task."""
        job = {
            "name": "work",
            "activation": "source",
            "runtime": "ecs_python",
            "operator": operator,
            "source": {"kind": "always_on"},
            "outputs": [{"name": "out", "storage": "none"}],
            **fields,
        }
        self.client.deploy(json.dumps({"name": dag, "jobs": [job]}).encode())

    def reconnect(self) -> None:
        """The replica was started anew, and has other ports."""
        self.client = self._clients.enter_context(_client(self.replica))

    def trigger(self, dag: str, ranges: Sequence[tuple[int, int]] = ((0, 9),)) -> None:
        for start, end in ranges:
            self.client.trigger(dag, "src", start=start, end=end)

    def task(self, dag: str) -> TaskDetail:
        """The DAG's only task."""
        [task] = self.client.tasks(dag=dag).tasks
        return self.client.task(task.task_id)

    def until(self, dag: str, what: str, condition: Callable[[TaskDetail], bool]) -> TaskDetail:
        def look() -> TaskDetail | None:
            shown = self.task(dag)
            return shown if condition(shown) else None

        return eventually(f"{what} of {dag}", look)

    def ended(self, dag: str) -> TaskDetail:
        return self.until(dag, "the end", lambda shown: shown.status in ENDED)

    def ran(self, dag: str, operator: str, **fields: Any) -> TaskDetail:
        """Deploy, trigger, and wait for the only task's end."""
        self.deploy(dag, operator, **fields)
        self.trigger(dag)
        return self.ended(dag)


@contextmanager
def open_scene(
    databases: Databases, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[WorkerScene]:
    replica = DispatcherProcess(
        folder / "dispatcher",
        state_dsn=databases.state_dsn,
        queue_dsn=databases.queue_dsn,
        environment=environment,
    )
    try:
        asyncio.run(replica.start())
        with ExitStack() as clients:
            client = clients.enter_context(_client(replica))
            yield WorkerScene(databases, folder, replica, client, clients)
    finally:
        asyncio.run(replica.close())


@contextmanager
def shared_scene(cluster: SharedPostgres, folder: Path) -> Iterator[WorkerScene]:
    """A scene on databases of its own in the run's one cluster."""
    dsns = [cluster.clone("empty", lambda _: None) for _ in range(2)]
    with open_scene(Databases(*dsns), folder) as opened:
        yield opened
    for dsn in dsns:
        cluster.drop(dsn)


def _client(replica: DispatcherProcess) -> Client:
    return Client(replica.user_url, replica.user_headers["Authorization"].removeprefix("Bearer "))


class BackfillScene:
    """``DAG/ingest`` stores blocks in chunks of ten, fed by ``DAG/src`` through ``DAG/split``."""

    def __init__(self, scene: WorkerScene, dag: str, *, url: str | None = None, **config: Any) -> None:
        """``url`` is the Dispatcher's address for the command, if it isn't the direct one."""
        self.scene = scene
        self.dag = dag
        self.url = url
        self.deploy(**config)

    def deploy(self, *, concurrency: int = 1, **config: Any) -> None:
        reactive = {"activation": "reactive", "execution_strategy": "PerPartition"}
        split = {
            "name": "split",
            **reactive,
            "runtime": "dispatcher",
            "operator": "range_splitter",
            "inputs": [{"from": {"job": "src", "output": 0}}],
            "config": {"chunk_size": CHUNK},
            "scaling": {"max_concurrency": 1},
            "heartbeat_timeout_seconds": 5,
        }
        ingest = {
            "name": "ingest",
            **reactive,
            "runtime": "ecs_python",
            "operator": "pretend_ingest",
            "inputs": [{"from": {"job": "split", "output": 0}}],
            "outputs": [{"name": "blocks", "storage": "parquet"}, {"name": "logs", "storage": "parquet"}],
            "config": config,
            "scaling": {"max_concurrency": concurrency},
        }
        dag = {"name": self.dag, "jobs": [MANUAL_SOURCE, split, ingest]}
        self.scene.client.deploy(json.dumps(dag).encode())

    @property
    def where(self) -> tuple[str, ...]:
        token = self.scene.replica.user_headers["Authorization"].removeprefix("Bearer ")
        return ("--url", self.url or self.scene.replica.user_url, "--token", token)

    def run(self, *options: str, job: str = "ingest") -> subprocess.CompletedProcess[str]:
        """The command from beginning to end."""
        return tracelake("backfill", f"{self.dag}/{job}", *options, *self.where)

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = ("-m", "tracelake", "backfill", f"{self.dag}/ingest", *options, *self.where)
        return subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def tasks(self, job: str = "ingest") -> list[TaskSummary]:
        """Every one that there ever was, oldest first."""
        found = self.scene.client.tasks(dag=self.dag, job=job, limit=1000).tasks
        return list(reversed(found))

    def committed(self) -> int:
        return sum(task.status == "Completed" for task in self.tasks())

    def scopes(self) -> Counter[tuple[int | None, int | None]]:
        return Counter((task.start, task.end) for task in self.tasks())
