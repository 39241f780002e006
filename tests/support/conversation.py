"""``Conversation``: short tests of the Dispatcher's steps, as deploy, trigger, claim, complete, look.

It calls the real steps on the test's own database and raises their refusals, so that a test reads as a sequence
of calls and their results. Time passes only by ``pass_time``.

A real operator can run between the steps: it is claimed, run in a thread of the test, and completed. A few
lines stand in for the worker; calls go to the steps directly, under the attempt's fence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import msgspec
from msgspec import UNSET

from tracelake.contracts.dispatcher_api import (
    ClaimRequest,
    ClaimResponse,
    CompleteRequest,
    CompleteResponse,
    CompletionStatus,
    EventIn,
    EventsRequest,
    EventsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    InputFile,
    InvalidateRange,
    OutputIn,
    PayloadInput,
    TaskInputsQuery,
    TaskPayload,
    TriggerRequest,
    TriggerResponse,
)
from tracelake.contracts.operator_protocol import Action, EmitEvents, ListFiles
from tracelake.dispatcher.steps.accept_events import accept_events, trigger_source
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import Deployed, deploy_dag
from tracelake.dispatcher.steps.interventions import cancel_task
from tracelake.dispatcher.steps.running_attempt import heartbeat, list_inputs
from tracelake.dispatcher.steps.upkeep import begin_listening, reap_leases
from tracelake.domain.errors import TracelakeError
from tracelake.domain.operators.catalog import CATALOG
from tracelake.domain.task import TaskStatus
from tracelake.operators.context import Context
from tracelake.operators.registry import Registry
from tracelake.postgres import sqlfiles
from tracelake.store.db import DeployLock, Row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SQL = sqlfiles.load("tests.support", "conversation.sql")
T = TypeVar("T")


def source(
    name: str = "src", *, kind: str = "manual", storage: str = "none", **fields: Any
) -> dict[str, Any]:
    """A job entry for a source. An always-on one has an operator that nobody knows."""
    operator = {} if kind == "manual" else {"operator": "noop"}
    return {
        "name": name,
        "activation": "source",
        "runtime": "dispatcher" if kind == "manual" else _runtime(fields),
        "source": {"kind": kind},
        "outputs": [{"name": name, "storage": storage}],
        **operator,
        **fields,
    }


def reactive(
    name: str,
    *inputs: str | Mapping[str, Any],
    strategy: str = "PerPartition",
    storage: str = "none",
    **fields: Any,
) -> dict[str, Any]:
    """A job entry that reads ``inputs``: job names (``job:1`` for output 1) or whole input entries."""
    return {
        "name": name,
        "activation": "reactive",
        "runtime": _runtime(fields),
        "operator": "noop",
        "inputs": [_input(entry) for entry in inputs],
        "outputs": [{"name": name.replace("-", "_"), "storage": storage}],
        "execution_strategy": strategy,
        **fields,
    }


def _runtime(fields: Mapping[str, Any]) -> str:
    """The runtime of a job that names none: ``ecs_python`` unless its operator can't run there."""
    spec = CATALOG.get(fields.get("operator", "noop"))
    return "ecs_python" if spec is None or "ecs_python" in spec.runtimes else spec.runtimes[0]


def _input(entry: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(entry, str):
        return entry
    job, _, output = entry.partition(":")
    return {"from": {"job": job, "output": int(output or 0)}}


def dag(*jobs: Mapping[str, Any], name: str = "chain", **fields: Any) -> str:
    """A DAG file; JSON is YAML."""
    return json.dumps({"name": name, "jobs": jobs, **fields}, indent=1)


def taken_back(uuid: UUID, start: int, end: int, key: str = "reorg-1", reason: str | None = None) -> EventIn:
    return EventIn(dataset_uuid=uuid, id=key, invalidate=InvalidateRange(start, end), reason=reason)


@dataclass(frozen=True, slots=True)
class Lease:
    """A claimed attempt: its fence and its payload."""

    task_id: UUID
    attempt: int
    token: UUID
    payload: TaskPayload
    worker: str

    @property
    def read(self) -> PayloadInput:
        return self.payload.inputs[0]

    def completion(self, *outputs: OutputIn, **fields: Any) -> CompleteRequest:
        status: CompletionStatus = fields.pop("status", "Completed")
        return CompleteRequest(self.task_id, status, self.attempt, self.token, list(outputs), **fields)


class Conversation:
    """What workers, tasks and people say, and what the database shows afterwards."""

    def __init__(self, ctx: StepContext) -> None:
        self.ctx = ctx

    async def deploy(self, yaml: str) -> Deployed:
        return await deploy_dag(self.ctx, yaml, "tester")

    async def trigger(
        self, start: int | None = None, end: int | None = None, *, cursor: int | None = None, job: str = "src"
    ) -> TriggerResponse:
        return await trigger_source(self.ctx, "chain", job, TriggerRequest(cursor, start, end))

    async def claim(self, task_id: UUID, worker: str = "w1", key: str | None = None) -> ClaimResponse:
        [answer] = await claim_tasks(self.ctx, [ClaimRequest(task_id, worker, key)])
        return answer

    async def lease(self, job_or_task: str | UUID, worker: str = "w1", key: str | None = None) -> Lease:
        """Claim a task, or the only queued one of a job; it must succeed."""
        task_id = job_or_task if isinstance(job_or_task, UUID) else await self.only_queued(job_or_task)
        answer = await self.claim(task_id, worker, key)
        assert answer.status == "Claimed", answer.reason
        return lease_of(answer, worker)

    async def beat(self, lease: Lease) -> HeartbeatResponse:
        return await heartbeat(self.ctx, HeartbeatRequest(lease.task_id, lease.attempt, lease.token))

    async def say(self, request: CompleteRequest) -> CompleteResponse:
        """One completion; what is refused is raised."""
        [answer] = await complete_tasks(self.ctx, [request])
        if isinstance(answer, TracelakeError):
            raise answer
        return answer

    async def complete(self, lease: Lease, *outputs: OutputIn, **fields: Any) -> CompleteResponse:
        return await self.say(lease.completion(*outputs, **fields))

    async def complete_scope(self, lease: Lease) -> CompleteResponse:
        """Complete a PerPartition task with its own scope on every output, empty."""
        start, end = lease.read.start, lease.read.end
        assert isinstance(start, int)
        assert isinstance(end, int)
        outputs = [OutputIn(o.output_index, start=start, end=end, row_count=0) for o in lease.payload.outputs]
        return await self.complete(lease, *outputs)

    async def run(self, job: str) -> Lease:
        """Claim the only queued task of a PerPartition job and complete its scope."""
        lease = await self.lease(job)
        await self.complete_scope(lease)
        return lease

    async def fail(self, lease: Lease, **fields: Any) -> CompleteResponse:
        return await self.complete(lease, status="Failed", error_message="it broke", **fields)

    async def emit(self, lease: Lease, *events: EventIn, fenced: bool = True) -> EventsResponse:
        token = lease.token if fenced else None
        return await accept_events(self.ctx, EventsRequest(lease.task_id, lease.attempt, list(events), token))

    async def cancel(self, task_id: UUID) -> None:
        await cancel_task(self.ctx, task_id, "tester")

    async def reap(self, *, listened_for: float = 10_000.0) -> int:
        """Reap as a Dispatcher that began to listen, and ``listened_for`` seconds have passed since."""
        since = await begin_listening(self.ctx)
        await self.pass_time(listened_for)
        return await reap_leases(self.ctx, since)

    async def pass_time(self, seconds: float) -> None:
        if not (await self._one(SQL.clock_owned))["owned"]:
            await self._execute(SQL.own_clock)
        await self._fetch(SQL.advance_clock, seconds)

    async def tasks(self, job: str, *statuses: str) -> list[UUID]:
        rows = await self._fetch(SQL.tasks_of_job, job, statuses or tuple(TaskStatus))
        return [row["task_id"] for row in rows]

    async def queued(self, job: str) -> list[UUID]:
        return await self.tasks(job, "Queued")

    async def only_queued(self, job: str) -> UUID:
        queued = await self.queued(job)
        assert len(queued) == 1, f"{job} has {len(queued)} queued tasks"
        return queued[0]

    async def task(self, task_id: UUID) -> Row:
        return await self._one(SQL.task, task_id)

    async def status(self, task_id: UUID) -> str:
        status: str = (await self.task(task_id))["status"]
        return status

    async def attempts(self, task_id: UUID) -> list[Row]:
        return await self._fetch(SQL.attempts, task_id)

    async def due_wakes(self) -> list[UUID]:
        return [row["task_id"] for row in await self._fetch(SQL.wakes) if row["due"]]

    async def all_wakes(self) -> list[Row]:
        return await self._fetch(SQL.wakes)

    async def forget_wakes(self) -> None:
        await self._fetch(SQL.forget_wakes)

    async def scopes(self, job: str, output: int = 0) -> list[tuple[int, int]]:
        rows = await self._fetch(SQL.partitions, job, output)
        return [(row["range_start"], row["range_end"]) for row in rows]

    async def output(self, job: str, index: int = 0) -> Row:
        return await self._one(SQL.output, job, index)

    async def dataset(self, job: str, index: int = 0) -> UUID:
        uuid: UUID = (await self.output(job, index))["dataset_uuid"]
        return uuid

    async def consumed(self, job: str, index: int = 0) -> Row:
        return await self._one(SQL.consumed, job, index)

    async def events(self) -> list[Row]:
        return await self._fetch(SQL.events)

    async def everything(self) -> str:
        """A digest of all that a refused or repeated call must leave alone."""
        state: str = (await self._one(SQL.fingerprint))["state"]
        return state

    async def has_waiting_session(self) -> bool:
        return bool((await self._one(SQL.waiting_sessions))["waiting"])

    async def query(self, sql: str, *args: Any) -> list[Row]:
        return await self._fetch(sql, *args)

    async def _fetch(self, sql: str, *args: Any) -> list[Row]:
        return await self.ctx.db.run(lambda tx: tx.fetch(sql, *args), lock=DeployLock.NONE)

    async def _one(self, sql: str, *args: Any) -> Row:
        [row] = await self._fetch(sql, *args)
        return row

    async def _execute(self, sql: str) -> None:
        await self.ctx.db.run(lambda tx: tx.execute(sql), lock=DeployLock.NONE)


def lease_of(answer: ClaimResponse, worker: str = "w1") -> Lease:
    assert answer.attempt is not None
    assert answer.lease_token is not None
    assert answer.task is not None
    return Lease(answer.task_id, answer.attempt, answer.lease_token, answer.task, worker)


class StepLink:
    """An operator's line to the steps, from another thread than theirs."""

    canceled = paused = False

    def __init__(self, talk: Conversation, lease: Lease, spark: SparkSession | None) -> None:
        self._talk = talk
        self._lease = lease
        self._spark = spark
        self._loop = asyncio.get_running_loop()

    def call(self, action: Action) -> Any:
        match action:
            case ListFiles(index, margin):
                return msgspec.to_builtins(self._wait(self._list(index, margin)))
            case EmitEvents(events):
                return msgspec.to_builtins(self._wait(self._talk.emit(self._lease, *events)))
            case _:
                raise AssertionError(action)

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> SparkSession:
        assert self._spark is not None
        return self._spark

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _list(self, index: int, margin: int) -> list[InputFile]:
        files: list[InputFile] = []
        after: str | None = None
        while True:
            query = TaskInputsQuery(self._lease.task_id, self._lease.attempt, index, after or UNSET, margin)
            page = await list_inputs(self._talk.ctx, query)
            files += page.files
            if page.next is None:
                return files
            after = page.next


async def run_operator(
    talk: Conversation, job: str, spark: SparkSession | None = None, **fields: Any
) -> Lease:
    """Claim the only queued task of a job, run its operator and complete it; what it raises is raised here, with
    the attempt still running. ``fields`` are what a worker gives a context."""
    lease = await talk.lease(job)
    ctx = Context(lease.payload, StepLink(talk, lease, spark), **fields)
    try:
        await asyncio.to_thread(Registry.standard().get(lease.payload.operator), ctx)
        outputs, events = await asyncio.to_thread(ctx.finish)
    finally:
        ctx.close()
    await talk.complete(lease, *outputs, events=events)
    return lease
