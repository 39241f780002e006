"""Load on real Dispatchers over HTTP, and a ledger of everything that was acknowledged.

Producers trigger scopes and cursors, workers take wake-ups from the queue, claim, heartbeat, sometimes fail,
sometimes die, and complete. Each call is repeated, on whichever replica answers, until there is an answer:
that is what the contract asks of a caller. What was answered with 2xx goes into the ledger, and
``load_audit`` holds the database to it. An answer that a fault can't excuse is a surprise.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any, Self

from tracelake.domain.errors import Unavailable
from tracelake.queue.postgres import PostgresQueue
from tracelake.testing.caller import Caller, Ledger
from tracelake.testing.dispatcher_process import DispatcherProcess

QUEUE = "ecs_python"
SCOPE_JOBS = ("first", "second", "third")
LEASE_SECONDS = 2
SCOPE_SIZE = 10
_PAUSE = 0.05

DAG = f"""
name: load
defaults:
  heartbeat_timeout_seconds: {LEASE_SECONDS}
  max_attempts: 100
  retry: {{ base: 0, max: 1 }}
jobs:
  - {{ name: scopes, activation: source, runtime: dispatcher, source: {{ kind: manual }}, outputs: 1 }}
  - {{ name: ticks, activation: source, runtime: dispatcher, source: {{ kind: manual }}, outputs: 1 }}
  - name: first
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: scopes, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerPartition
  - name: second
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: first, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerPartition
    scaling: {{ max_concurrency: 3 }}
  - name: third
    activation: reactive
    runtime: dispatcher
    operator: noop
    inputs: [{{ from: {{ job: second, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerPartition
  - name: merge
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: ticks, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerUpdate
"""


class Worker:
    """One worker process' behaviour: several tasks at once, a heartbeat each, and now and then a death."""

    def __init__(self, name: str, caller: Caller, queue: PostgresQueue, ledger: Ledger, seed: int) -> None:
        self.name = name
        self._caller = caller
        self._queue = queue
        self._ledger = ledger
        self._random = random.Random(seed)

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                messages = await self._queue.receive(
                    QUEUE, max_messages=4, wait_seconds=0.5, visibility_seconds=5.0
                )
                await asyncio.gather(*(self._take(str(message.body["task_id"])) for message in messages))
                await self._queue.ack([message.receipt for message in messages])
            except Unavailable as error:
                self._ledger.repeats[error.reason] += 1
                await asyncio.sleep(_PAUSE)

    async def _take(self, task_id: str) -> None:
        key = f"{self._random.getrandbits(64):x}"
        claim = {"task_id": task_id, "worker_id": self.name, "claim_key": key}
        answer = await self._caller.say("internal", "/internal/task-claim", json=claim)
        if answer.status_code != 200:
            self._ledger.surprises.append(f"claim: {answer.status_code} {answer.text[:300]}")
            return
        claimed = answer.json()
        if claimed["status"] == "Claimed":
            await self._execute(claimed)

    async def _execute(self, claimed: dict[str, Any]) -> None:
        fence = {name: claimed[name] for name in ("task_id", "attempt", "lease_token")}
        fate = self._random.random()
        if fate < 0.02:
            return
        beating = asyncio.create_task(self._beat(fence))
        try:
            slow = self._random.random() < 0.05
            await asyncio.sleep(self._random.uniform(0.5, 1.5) if slow else self._random.uniform(0, 0.01))
            if fate < 0.05:
                await self._complete({**fence, "status": "Failed", "error_message": "as planned"})
            else:
                await self._complete({**fence, "status": "Completed", "outputs": [_output(claimed["task"])]})
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    async def _beat(self, fence: dict[str, Any]) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            answer = await self._caller.say("internal", "/internal/heartbeat", json=fence)
            if answer.status_code == 409:
                return

    async def _complete(self, completion: dict[str, Any]) -> None:
        answer = await self._caller.say("internal", "/internal/task-complete", json=completion)
        if answer.status_code == 409:
            self._ledger.refusals[answer.json()["reason"]] += 1
        elif answer.status_code != 200:
            self._ledger.surprises.append(f"completion: {answer.status_code} {answer.text[:300]}")
        elif completion["status"] == "Completed":
            self._ledger.completions[completion["task_id"]] = completion["attempt"]


def _output(task: dict[str, Any]) -> dict[str, Any]:
    read = task["inputs"][0]
    scope = {"start": read["start"], "end": read["end"]} if "start" in read else {"cursor": read["upto"]}
    return {"output_index": 0, "row_count": 0, **scope}


class Load:
    """``async with Load(...) as load`` deploys and starts workers; ``begin`` and ``finish`` the producers."""

    def __init__(
        self, replicas: Sequence[DispatcherProcess], queue_dsn: str, *, seed: int, workers: int = 4
    ) -> None:
        self.ledger = Ledger()
        self.caller = Caller(replicas, self.ledger, seed)
        self._queue_dsn = queue_dsn
        self._seed = seed
        self._worker_count = workers
        self._queue: PostgresQueue | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._producers: list[asyncio.Task[None]] = []
        self._producing = asyncio.Event()
        self._next_scope = 0

    async def __aenter__(self) -> Self:
        answer = await self.caller.say("user", "/v1/dags", content=DAG)
        assert answer.status_code in (200, 201), answer.text
        self._queue = await PostgresQueue.open(self._queue_dsn)
        for number in range(self._worker_count):
            worker = Worker(f"w{number}", self.caller, self._queue, self.ledger, self._seed + number)
            self._workers.append(asyncio.create_task(worker.run()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in (*self._producers, *self._workers):
            task.cancel()
        await asyncio.gather(*self._producers, *self._workers, return_exceptions=True)
        await self.caller.close()
        if self._queue is not None:
            await self._queue.close()

    def begin(self) -> None:
        """Trigger until ``finish``."""
        self._producing.set()
        self._producers = [asyncio.create_task(self._scopes()), asyncio.create_task(self._ticks())]

    async def finish(self) -> None:
        """Stop triggering; returns once the last trigger was answered."""
        self._producing.clear()
        await asyncio.gather(*self._producers)

    async def trigger(self, count: int) -> None:
        """``count`` more scopes, acknowledged."""
        for _ in range(count):
            await self._trigger_scope()

    async def made_progress(self, completions: int, patience: float = 60.0) -> None:
        """Returns once that many more completions were acknowledged than now."""
        wanted = len(self.ledger.completions) + completions
        async with asyncio.timeout(patience):
            while len(self.ledger.completions) < wanted:
                for task in (*self._workers, *self._producers):
                    if task.done() and not task.cancelled() and (error := task.exception()):
                        raise error
                await asyncio.sleep(_PAUSE)

    async def _scopes(self) -> None:
        while self._producing.is_set():
            await self._trigger_scope()
            await asyncio.sleep(_PAUSE)

    async def _trigger_scope(self) -> None:
        scope = (self._next_scope * SCOPE_SIZE, (self._next_scope + 1) * SCOPE_SIZE - 1)
        self._next_scope += 1
        trigger = {"start": scope[0], "end": scope[1]}
        answer = await self.caller.say("user", "/v1/sources/load/scopes/trigger", json=trigger)
        assert answer.status_code == 202, answer.text
        self.ledger.scopes.append(scope)

    async def _ticks(self) -> None:
        while self._producing.is_set():
            tick = self.ledger.highest_tick + 1
            answer = await self.caller.say("user", "/v1/sources/load/ticks/trigger", json={"cursor": tick})
            assert answer.status_code == 202, answer.text
            self.ledger.highest_tick = tick
            await asyncio.sleep(_PAUSE)
