"""``python -m bench.control.worker``: a worker as small as the contract allows, in a process of its own.

It waits on its runtime's queue, claims what it is woken for (one by the single call, several by the batch
call), completes each task with its scope and acknowledges the wake-ups. It says on its standard output what
it completed and when, on the machine's monotonic clock, which all processes share. Settings come as one JSON
object on its standard input: DSNs and tokens belong in no argument list.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from typing import Any

import msgspec
import orjson
import uvloop

from bench.control.connection import Connection
from tracelake.queue.base import Message
from tracelake.queue.postgres import PostgresQueue


class WorkerSettings(msgspec.Struct):
    """``lanes`` are batches under way at once: while one is being committed, the next is claimed."""

    internal_url: str
    worker_token: str
    queue_dsn: str
    queue: str
    batch: int
    lanes: int


class Worker:
    def __init__(self, settings: WorkerSettings, queue: PostgresQueue) -> None:
        self._settings = settings
        self._queue = queue
        self._worker_id = f"bench-{os.getpid()}"

    async def run_lane(self) -> None:
        settings = self._settings
        http = await Connection.open(settings.internal_url, X_Trace_Worker_Token=settings.worker_token)
        while True:
            messages = await self._queue.receive(
                settings.queue, max_messages=settings.batch, wait_seconds=20, visibility_seconds=60
            )
            if messages:
                claims = await self._claim(http, messages)
                acked = asyncio.create_task(self._queue.ack([message.receipt for message in messages]))
                await self._complete(http, [claim for claim in claims if claim["status"] == "Claimed"])
                await acked

    async def _claim(self, http: Connection, messages: list[Message]) -> list[dict[str, Any]]:
        wanted = [{"task_id": m.body["task_id"], "worker_id": self._worker_id} for m in messages]
        if len(wanted) == 1:
            return [await http.post("/internal/task-claim", wanted[0])]
        answer: dict[str, Any] = await http.post("/internal/task-claim-batch", {"claims": wanted})
        claims: list[dict[str, Any]] = answer["claims"]
        return claims

    async def _complete(self, http: Connection, claims: list[dict[str, Any]]) -> None:
        if not claims:
            return
        done = [_completion(claim) for claim in claims]
        if len(done) == 1:
            await http.post("/internal/task-complete", done[0])
        else:
            answer = await http.post("/internal/task-complete-batch", {"completions": done})
            refused = [entry for entry in answer["completions"] if entry["code"] != 200]
            if refused:
                raise RuntimeError(f"completions were refused: {refused[:3]}")
        report({"at": time.monotonic(), "tasks": [_name(claim["task"]) for claim in claims]})


def _completion(claim: dict[str, Any]) -> dict[str, Any]:
    scope = claim["task"]["inputs"][0]
    return {
        "task_id": claim["task_id"],
        "attempt": claim["attempt"],
        "lease_token": claim["lease_token"],
        "status": "Completed",
        "outputs": [
            {
                "output_index": output["output_index"],
                "dataset_uuid": output["dataset_uuid"],
                "dataset_version": output["dataset_version"],
                "start": scope["start"],
                "end": scope["end"],
                "row_count": 0,
            }
            for output in claim["task"]["outputs"]
        ],
    }


def _name(task: dict[str, Any]) -> tuple[str, int]:
    return f"{task['job']['dag_name']}/{task['job']['name']}", task["inputs"][0]["start"]


def report(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
    sys.stdout.buffer.flush()


async def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
    queue = await PostgresQueue.open(settings.queue_dsn, pool_size=max(2, settings.lanes))
    await queue.listening()
    worker = Worker(settings, queue)
    gc.freeze()
    report({"ready": True})
    await asyncio.gather(*(worker.run_lane() for _ in range(settings.lanes)))


if __name__ == "__main__":
    uvloop.run(main())
