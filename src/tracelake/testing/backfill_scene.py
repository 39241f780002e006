"""A DAG to backfill and the command line that does it, on a Dispatcher and a worker of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

from tracelake.contracts.user_api import TaskSummary
from tracelake.testing.dev_stack import tracelake
from tracelake.testing.worker_scene import MANUAL_SOURCE, WorkerScene

CHUNK = 10


class BackfillScene:
    """``DAG/ingest`` stores blocks in chunks of ten, fed by ``DAG/src`` through ``DAG/split``."""

    def __init__(self, scene: WorkerScene, dag: str, *, url: str | None = None, **config: Any) -> None:
        """``url`` is where the command is told to go, when that isn't the straight way."""
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
