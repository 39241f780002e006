"""A Dispatcher, a worker and a user who deploys, triggers and looks: for tests of what workers do with tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracelake.client import Client
from tracelake.contracts.user_api import TaskDetail
from tracelake.testing.dev_stack import eventually
from tracelake.testing.dispatcher_process import DispatcherProcess
from tracelake.testing.shared_postgres import SharedPostgres
from tracelake.testing.site import Databases
from tracelake.testing.worker_process import WorkerProcess

ENDED = ("Completed", "Failed", "Canceled")
MANUAL_SOURCE: Mapping[str, Any] = {
    "name": "src",
    "activation": "source",
    "runtime": "dispatcher",
    "source": {"kind": "manual"},
    "outputs": 1,
}


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
