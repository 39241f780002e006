"""The DAGs that are measured: a chain of three no-op jobs, and one no-op job alone.

``manual`` sources are triggered by a person, one scope per call; an ``always_on`` source is a task that
announces many scopes per call, as a follower of a chain does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from bench.control.connection import Connection
from bench.control.stack import SOURCE_RUNTIME

EVENTS_PER_CALL = 1000


def dag(name: str, source: str, length: int) -> bytes:
    jobs = [_source(source)]
    jobs += [_step(step, "ecs_python", operator="noop") for step in range(1, length + 1)]
    return _encoded(name, jobs)


def one_job(name: str, source: str, runtime: str, **job: Any) -> bytes:
    """A source and one job on ``runtime``; ``job`` says what it runs."""
    return _encoded(name, [_source(source), _step(1, runtime, **job)])


def _encoded(name: str, jobs: list[dict[str, Any]]) -> bytes:
    return orjson.dumps({"name": name, "defaults": {"heartbeat_timeout_seconds": 3600}, "jobs": jobs})


def _source(kind: str) -> dict[str, Any]:
    return {
        "name": "step0",
        "activation": "source",
        "runtime": "dispatcher" if kind == "manual" else SOURCE_RUNTIME,
        "operator": "noop",
        "source": {"kind": kind},
        "outputs": 1,
    }


def _step(step: int, runtime: str, **job: Any) -> dict[str, Any]:
    return {
        "name": f"step{step}",
        "activation": "reactive",
        "runtime": runtime,
        "inputs": [{"from": {"job": f"step{step - 1}", "output": 0}}],
        "outputs": [{"name": "done", "storage": "none"}],
        "execution_strategy": "PerPartition",
        **job,
    }


@dataclass(frozen=True)
class Source:
    """An ``always_on`` source's lease: its holder may announce scopes."""

    http: Connection
    fence: dict[str, Any]
    output: dict[str, Any]

    async def announce(self, starts: range) -> None:
        """Scopes of one block each, as many per call as the contract takes."""
        for first in range(0, len(starts), EVENTS_PER_CALL):
            events = [
                {**self.output, "start": start, "end": start}
                for start in starts[first : first + EVENTS_PER_CALL]
            ]
            await self.http.post("/internal/events", {**self.fence, "events": events})


async def hold_source(user: Connection, worker: Connection, name: str) -> Source:
    listed = await user.get(f"/v1/tasks?dag={name}&job=step0")
    task_id = listed["tasks"][0]["task_id"]
    claim = await worker.post("/internal/task-claim", {"task_id": task_id, "worker_id": "bench-source"})
    if claim["status"] != "Claimed":
        raise RuntimeError(f"the source of {name} could not be claimed: {claim['reason']}")
    fence = {key: claim[key] for key in ("task_id", "attempt", "lease_token")}
    output = {key: claim["task"]["outputs"][0][key] for key in ("dataset_uuid", "dataset_version")}
    return Source(worker, fence, output)
