"""Tracelake as people run it: ``tracelake dev`` with a warm Spark, one ``evm_ingest`` task per measurement."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.dev_stack import DevStack
from tracelake.client import Client
from tracelake.contracts.user_api import TaskSummary

_LOOK_SECONDS = 0.01
_SAMPLE_SECONDS = 0.1
_WARM_UP = 199
_ENDED = ("Completed", "Failed", "Canceled")
_JOB = """
  - {{ name: ask_{name}, activation: source, runtime: dispatcher, source: {{ kind: manual }}, outputs: 1 }}
  - name: ingest_{name}
    activation: reactive
    runtime: ecs_spark
    operator: evm_ingest
    inputs: [{{ from: {{ job: ask_{name}, output: 0 }} }}]
    outputs: 3
    execution_strategy: PerPartition
    update_strategy: replace
    max_attempts: 1
    config: {{ rpc_pool: replay, verify: {verify} }}"""


class Ours:
    """Each measurement is a job of its own: what a job has committed it doesn't fetch again."""

    def __init__(self, stack: DevStack, client: Client) -> None:
        self._stack = stack
        self._client = client
        self._jobs = 0

    def ingest(self, verify: str, end: int) -> float:
        """Seconds from the request for blocks 0 to ``end`` to their commit."""
        self._jobs += 1
        name = f"{verify}_{self._jobs}"
        self._client.deploy(f"name: bench_{name}\njobs:{_JOB.format(name=name, verify=verify)}".encode())
        began = time.monotonic()
        self._client.trigger(f"bench_{name}", f"ask_{name}", start=0, end=end)
        while (task := self._task(name)) is None or task.status not in _ENDED:
            time.sleep(_LOOK_SECONDS)
        seconds = time.monotonic() - began
        if task.status != "Completed":
            raise SystemExit(f"the ingest failed: {self._client.task(task.task_id).error_message}")
        return seconds

    def peak_memory(self, verify: str, end: int) -> int:
        """The most bytes that the Python processes below the worker held together during an ingest."""
        worker = psutil.Process(self._stack.handle.pids["worker-ecs_spark"])
        peak, done = 0, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(_SAMPLE_SECONDS):
                peak = max(peak, sum(map(_held, worker.children(recursive=True))))

        sampling = threading.Thread(target=sample)
        sampling.start()
        try:
            self.ingest(verify, end)
        finally:
            done.set()
            sampling.join()
        return peak

    def _task(self, name: str) -> TaskSummary | None:
        return next(iter(self._client.tasks(dag=f"bench_{name}", job=f"ingest_{name}").tasks), None)


def _held(process: psutil.Process) -> int:
    """What it would give back if it ended: pages that it shares with others aren't counted."""
    with suppress(psutil.Error):
        if "python" in process.name():
            return int(process.memory_full_info().uss)
    return 0


@contextmanager
def warm_stack(folder: Path, url: str) -> Iterator[Ours]:
    pools = folder / "rpc.toml"
    pools.write_text(f'[pools.replay]\n[[pools.replay.endpoints]]\nname = "replay"\nurl = "{url}"\n')
    pools.chmod(0o600)
    stack = DevStack(folder / "home", folder, "--rpc-pools", str(pools), workers=True)
    try:
        handle = stack.until_ready()
        with Client(handle.user_url, handle.user_token) as client:
            ours = Ours(stack, client)
            ours.ingest("full", _WARM_UP)
            yield ours
    finally:
        stack.close()
