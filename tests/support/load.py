"""Load on real Dispatchers over HTTP, a ledger of everything that was acknowledged, and an audit against the
database.

Producers trigger scopes and cursors; workers take wake-ups from the queue, claim, heartbeat, sometimes fail,
sometimes die, and complete. Each call is repeated, on any replica, until there is an answer: the contract asks
that of a caller. Broken connections and 503 with a reason are the faults that a caller sees; any other 5xx is a
surprise, and the ledger keeps it as one.

The audit knows the history of acknowledged calls and the database at the end, and nothing else: nothing
acknowledged is lost, nothing was committed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import asyncpg
import httpx

from tests.support.processes import DispatcherProcess
from tracelake.domain.errors import Unavailable
from tracelake.postgres import sqlfiles
from tracelake.queue.postgres import PostgresQueue

PATIENCE = 180.0
_PAUSE = 0.05
Port = Literal["user", "internal"]
QUEUE = "ecs_python"
SCOPE_JOBS = ("first", "second", "third")
LEASE_SECONDS = 2
SCOPE_SIZE = 10
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
SQL = sqlfiles.load("tests.support", "load_audit.sql")
_POLL = 0.1


@dataclass(slots=True)
class Ledger:
    """``completions`` are tasks whose completion was acknowledged, with the attempt that was."""

    scopes: list[tuple[int, int]] = field(default_factory=list)
    highest_tick: int = -1
    completions: dict[str, int] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    repeats: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)


class Caller:
    """Repeats a call until a replica answers."""

    def __init__(self, replicas: Sequence[DispatcherProcess], ledger: Ledger, seed: int) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._random = random.Random(seed)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(3.0), trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, port: Port, path: str) -> httpx.Response:
        return await self._until_answered("GET", port, path)

    async def say(
        self, port: Port, path: str, *, json: object = None, content: str | None = None
    ) -> httpx.Response:
        return await self._until_answered("POST", port, path, json=json, content=content)

    async def _until_answered(self, method: str, port: Port, path: str, **body: Any) -> httpx.Response:
        async with asyncio.timeout(PATIENCE):
            while True:
                replica = self._random.choice(self._replicas)
                internal = port == "internal"
                base = replica.internal_url if internal else replica.user_url
                headers = replica.worker_headers if internal else replica.user_headers
                try:
                    answer = await self._http.request(method, base + path, headers=headers, **body)
                except httpx.TransportError as error:
                    self._ledger.repeats[type(error).__name__] += 1
                else:
                    if answer.status_code < 500:
                        return answer
                    self._note(path, answer)
                await asyncio.sleep(_PAUSE)

    def _note(self, path: str, answer: httpx.Response) -> None:
        problem = answer.headers.get("content-type", "").startswith("application/problem+json")
        if answer.status_code == 503 and problem:
            self._ledger.repeats[answer.json()["reason"]] += 1
        else:
            self._ledger.surprises.append(f"{path}: {answer.status_code} {answer.text[:300]}")


class Worker:
    """One worker process' behaviour: several tasks at once, a heartbeat each, and now and then a death."""

    def __init__(self, name: str, caller: Caller, queue: PostgresQueue, ledger: Ledger, seed: int) -> None:
        self.name = name
        self._caller = caller
        self._queue = queue
        self._ledger = ledger
        self._random = random.Random(seed)

    async def run(self) -> None:
        """Work until canceled."""
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


async def settled(state_dsn: str, patience: float = 60.0) -> None:
    """Wait until no task waits or runs and the outbox is empty; report what is left after a timeout."""
    connection = await asyncpg.connect(state_dsn)
    left: list[str] = []
    try:
        async with asyncio.timeout(patience):
            while True:
                left = [row["what"] for row in await connection.fetch(SQL.unfinished)]
                if not left:
                    return
                await asyncio.sleep(_POLL)
    except TimeoutError:
        raise AssertionError("still unfinished:\n" + "\n".join(left)) from None
    finally:
        await connection.close()


async def audit(state_dsn: str, ledger: Ledger) -> list[str]:
    """Every way in which the settled database contradicts the ledger."""
    connection = await asyncpg.connect(state_dsn)
    try:
        return [
            *ledger.surprises,
            *_scopes(ledger, await connection.fetch(SQL.scopes)),
            *_attempts(ledger, await connection.fetch(SQL.completed_attempts)),
            *_partitions(ledger, await connection.fetch(SQL.committed_scopes)),
            *_merged(ledger, await connection.fetch(SQL.merged_ranges), await _cursor(connection)),
        ]
    finally:
        await connection.close()


async def _cursor(connection: asyncpg.Connection[Any]) -> int:
    cursor: int = await connection.fetchval(SQL.merge_cursor)
    return cursor


def _scopes(ledger: Ledger, rows: list[asyncpg.Record]) -> list[str]:
    """One task for each job and acknowledged scope, and it is completed."""
    found: Counter[tuple[str, int, int]] = Counter()
    wrong = []
    for row in rows:
        found[row["job"], row["range_start"], row["range_end"]] += 1
        if row["status"] != "Completed":
            wrong.append(f"{row['job']} {row['range_start']}-{row['range_end']} is {row['status']}")
    wanted = {(job, start, end) for job in SCOPE_JOBS for start, end in ledger.scopes}
    wrong += [f"lost: no task of {job} for {start}-{end}" for job, start, end in sorted(wanted - set(found))]
    wrong += [f"nobody asked for {job} {start}-{end}" for job, start, end in sorted(set(found) - wanted)]
    wrong += [f"{count} tasks of {scope}" for scope, count in found.items() if count != 1]
    return wrong


def _attempts(ledger: Ledger, rows: list[asyncpg.Record]) -> list[str]:
    """A task is completed by one attempt, the one that was acknowledged."""
    counted = {str(row["task_id"]): row["attempts"] for row in rows}
    wrong = [
        f"task {task} was completed by attempts {each}" for task, each in counted.items() if len(each) > 1
    ]
    for task, attempt in ledger.completions.items():
        if counted.get(task) != [attempt]:
            wrong.append(f"task {task}: attempt {attempt} was acknowledged, {counted.get(task)} counted")
    return wrong


def _partitions(ledger: Ledger, rows: list[asyncpg.Record]) -> list[str]:
    """Each job's output has each scope once, and no other."""
    wrong = []
    for job in SCOPE_JOBS:
        spans = sorted((row["range_start"], row["range_end"]) for row in rows if row["job"] == job)
        if spans != sorted(ledger.scopes):
            wrong.append(
                f"the partitions of {job} are {spans[:5]}…, not the {len(ledger.scopes)} scopes asked for"
            )
    return wrong


def _merged(ledger: Ledger, rows: list[asyncpg.Record], cursor: int) -> list[str]:
    """The ranges that were read follow each other without gap or overlap up to the last cursor."""
    wrong = []
    reached = -1
    for row in rows:
        if row["status"] != "Completed":
            wrong.append(f"merge up to {row['upto']} is {row['status']}")
        elif row["after"] != reached:
            wrong.append(f"merge read on from {row['after']} after it had read up to {reached}")
        reached = row["upto"]
    if not reached == cursor == ledger.highest_tick:
        wrong.append(
            f"merge read up to {reached}, its cursor is {cursor}, ticks went to {ledger.highest_tick}"
        )
    return wrong
