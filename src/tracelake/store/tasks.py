"""Tasks, their attempts, and the state that an attempt leaves for the next one of the same task.

There is one saved state per task, and saving replaces it. The caller holds the task's row and has checked the
fence, so a superseded attempt never overwrites what its successor saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tracelake.domain.block_range import BlockRange
from tracelake.domain.task import ClaimGate, Ending, Outcome, RetryPolicy, TaskKind, TaskState, TaskStatus
from tracelake.postgres import sqlfiles
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "tasks.sql")


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task with its job's settings; locked unless it came from ``read``. ``bulk`` is work of a backfill,
    ``is_bulk`` that or work of a bulk job. ``held``: its job is paused or held, or is held for work like this."""

    state: TaskState
    seq: int
    job_id: UUID
    scope: BlockRange | None
    inputs: list[dict[str, Any]] | None
    output_revisions: dict[str, int] | None
    lease_expires_at: datetime | None
    epoch: int | None
    runtime: str
    timeout_seconds: int
    heartbeat_timeout_seconds: int
    idle_timeout_seconds: int | None
    max_concurrency: int | None
    now: datetime
    operator: str
    bulk: bool
    is_bulk: bool
    held: bool
    operator_cap: int | None

    @property
    def task_id(self) -> UUID:
        return self.state.task_id

    @property
    def gated(self) -> bool:
        """Whether the job, or its operator, admits a limited number at a time, so that claims and endings must lock
        its row."""
        return (
            self.max_concurrency is not None
            or self.operator_cap is not None
            or self.state.kind is TaskKind.CURSOR
        )


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task that may run now, and its runtime. ``wake`` is false when a free slot will wake it later."""

    task_id: UUID
    runtime: str
    wake: bool = True
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class AttemptStart:
    task_id: UUID
    job_id: UUID
    worker_id: str
    claim_key: str | None
    lease_token: UUID
    inputs: list[dict[str, Any]]
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class StartedAttempt:
    """``outputs`` has revision and published name of each version that the attempt writes; ``state`` was saved by
    an earlier attempt."""

    attempt: int
    lease_expires_at: datetime
    epoch: int
    outputs: dict[UUID, tuple[int, str | None]]
    state: Any


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    task_id: UUID
    ending: Ending
    error_message: str | None
    digest: bytes | None
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    lease_token: UUID
    outcome: Outcome | None
    digest: bytes | None
    result: dict[str, Any] | None


async def lock(tx: Transaction, task_ids: Iterable[UUID]) -> dict[UUID, TaskRow]:
    rows = await tx.fetch(SQL.lock_tasks, list(task_ids))
    return {row["task_id"]: _task(row) for row in rows}


async def read(tx: Transaction, task_id: UUID) -> TaskRow | None:
    row = await tx.fetchrow(SQL.read_task, task_id)
    return _task(row) if row else None


async def share(tx: Transaction, task_id: UUID) -> TaskRow | None:
    """A task whose attempt can't end before this transaction does."""
    row = await tx.fetchrow(SQL.share_task, task_id)
    return _task(row) if row else None


async def lock_gates(tx: Transaction, job_ids: Iterable[UUID]) -> None:
    # One order everywhere: two steps that lock the same jobs can't wait for each other.
    wanted = sorted(set(job_ids))
    if wanted:
        await tx.fetch(SQL.lock_gates, wanted)


async def claim_gates(tx: Transaction, tasks: Sequence[TaskRow]) -> dict[UUID, ClaimGate]:
    """The gate of each task, by its job's limits; the jobs must be locked."""
    rows = await tx.fetch(SQL.read_gates, list({task.job_id for task in tasks}))
    by_job = {row["job_id"]: row for row in rows}
    gates = {}
    for task in tasks:
        row = by_job[task.job_id]
        first = row["first_cursor_seq"]
        earlier = task.state.kind is TaskKind.CURSOR and first is not None and first != task.seq
        gates[task.task_id] = ClaimGate(
            row["running"],
            row["max_concurrency"],
            earlier,
            in_flight=row["in_flight"] or 0,
            operator_cap=row["max_in_flight"],
        )
    return gates


async def claim_inputs(tx: Transaction, tasks: Sequence[TaskRow]) -> dict[UUID, list[Row]]:
    rows = await tx.fetch(
        SQL.claim_inputs,
        [task.task_id for task in tasks],
        [task.job_id for task in tasks],
        [task.state.kind.value for task in tasks],
        [task.scope.start if task.scope else None for task in tasks],
        [task.scope.end if task.scope else None for task in tasks],
        [task.seq for task in tasks],
    )
    inputs: dict[UUID, list[Row]] = {task.task_id: [] for task in tasks}
    for row in rows:
        inputs[row["task_id"]].append(row)
    return inputs


async def start_attempts(tx: Transaction, starts: Sequence[AttemptStart]) -> dict[UUID, StartedAttempt]:
    rows = await tx.fetch(
        SQL.start_attempts,
        [start.task_id for start in starts],
        [start.job_id for start in starts],
        [start.worker_id for start in starts],
        [start.claim_key for start in starts],
        [start.lease_token for start in starts],
        [msgspec.json.encode(start.inputs).decode() for start in starts],
        [start.lease_seconds for start in starts],
    )
    return {
        row["task_id"]: StartedAttempt(
            row["attempt"],
            row["lease_expires_at"],
            row["epoch"],
            {UUID(v): (revision, row["names"][v]) for v, revision in row["output_revisions"].items()},
            row["state"],
        )
        for row in rows
    }


async def extend_leases(tx: Transaction, leases: Sequence[tuple[UUID, float]]) -> dict[UUID, datetime]:
    rows = await tx.fetch(SQL.extend_leases, [lease[0] for lease in leases], [lease[1] for lease in leases])
    return {row["task_id"]: row["lease_expires_at"] for row in rows}


async def report_progress(tx: Transaction, task_id: UUID, attempt: int, progress: Mapping[str, Any]) -> None:
    await tx.execute(SQL.report_progress, task_id, attempt, dict(progress))


async def end_attempts(
    tx: Transaction, ends: Sequence[AttemptEnd]
) -> dict[UUID, tuple[dict[str, Any], datetime]]:
    """Write the endings; returns for each its answer and the time from which the task may run again."""
    if not ends:
        return {}
    ready_in = [end.ending.ready_in for end in ends]
    rows = await tx.fetch(
        SQL.end_attempts,
        [end.task_id for end in ends],
        [end.ending.outcome.value for end in ends],
        [end.ending.status.value for end in ends],
        [end.ending.failures for end in ends],
        [delay.total_seconds() if delay is not None else None for delay in ready_in],
        [end.error_message for end in ends],
        [end.digest for end in ends],
        [end.result for end in ends],
        [end.ending.shelved for end in ends],
    )
    return {row["task_id"]: (row["result"], row["ready_at"]) for row in rows}


async def claimed_at(tx: Transaction, task_id: UUID, attempt: int) -> datetime:
    row = await tx.fetchrow(SQL.claimed_at, task_id, attempt)
    assert row is not None
    began: datetime = row["claimed_at"]
    return began


async def ended_attempts(
    tx: Transaction, attempts: Sequence[tuple[UUID, int]]
) -> dict[tuple[UUID, int], EndedAttempt]:
    rows = await tx.fetch(SQL.ended_attempts, [a[0] for a in attempts], [a[1] for a in attempts])
    return {
        (row["task_id"], row["attempt"]): EndedAttempt(
            row["lease_token"],
            Outcome(row["outcome"]) if row["outcome"] else None,
            row["completion_digest"],
            row["result"],
        )
        for row in rows
    }


async def park(tx: Transaction, task_ids: Sequence[UUID]) -> None:
    """Tasks whose job was full wait for a slot; the gates are held, so none comes free unnoticed."""
    if task_ids:
        await tx.execute(SQL.park_tasks, list(task_ids))


async def stall(tx: Transaction, task_ids: Sequence[UUID]) -> None:
    if task_ids:
        await tx.execute(SQL.stall_tasks, list(task_ids))


async def wake_parked(tx: Transaction, slots: dict[UUID, int], max_bulk_wait: float) -> list[NewTask]:
    if not slots:
        return []
    return _new(await tx.fetch(SQL.wake_parked, list(slots), list(slots.values()), max_bulk_wait))


async def wake_parked_of_operators(
    tx: Transaction, slots: dict[str, int], max_bulk_wait: float
) -> list[NewTask]:
    if not slots:
        return []
    return _new(
        await tx.fetch(SQL.wake_parked_of_operators, list(slots), list(slots.values()), max_bulk_wait)
    )


async def create_partition_tasks(
    tx: Transaction,
    candidates: Sequence[tuple[UUID, UUID, BlockRange, dict[str, Any]]],
    *,
    kept: bool = False,
    bounded: bool = False,
) -> list[NewTask]:
    """``(new task id, job, scope, cause)`` each; creates tasks only for scopes that are complete and new. ``kept``
    ones have waited for their turn already. If ``bounded``, those for which a queue has no room are kept."""
    if not candidates:
        return []
    rows = await tx.fetch(
        SQL.create_partition_tasks,
        [candidate[0] for candidate in candidates],
        [candidate[1] for candidate in candidates],
        [candidate[2].start for candidate in candidates],
        [candidate[2].end for candidate in candidates],
        [candidate[3] for candidate in candidates],
        kept,
        bounded,
    )
    return [NewTask(row["task_id"], row["runtime"], row["wake"], row["bulk"]) for row in rows]


async def create_cursor_tasks(
    tx: Transaction, candidates: Sequence[tuple[UUID, UUID, dict[str, Any]]]
) -> list[NewTask]:
    """``(new task id, job, cause)`` each, under the jobs' gates."""
    if not candidates:
        return []
    rows = await tx.fetch(
        SQL.create_cursor_tasks,
        [candidate[0] for candidate in candidates],
        [candidate[1] for candidate in candidates],
        [candidate[2] for candidate in candidates],
    )
    return _new(rows)


async def create_source_task(
    tx: Transaction, task_id: UUID, job_id: UUID, cause: dict[str, Any]
) -> list[NewTask]:
    return _new(await tx.fetch(SQL.create_source_task, task_id, job_id, cause))


async def expired_leases(tx: Transaction, listening_since: datetime, limit: int) -> list[UUID]:
    return [row["task_id"] for row in await tx.fetch(SQL.expired_leases, listening_since, limit)]


async def unwoken_tasks(tx: Transaction, after_seconds: float, limit: int) -> list[NewTask]:
    return _new(await tx.fetch(SQL.unwoken_tasks, after_seconds, limit))


async def requeue(tx: Transaction, task_id: UUID) -> None:
    await tx.execute(SQL.requeue_task, task_id)


async def cancel(tx: Transaction, task_ids: Sequence[UUID], why: str | None) -> None:
    if task_ids:
        await tx.execute(SQL.cancel_tasks, list(task_ids), why)


async def shelve(tx: Transaction, task_ids: Sequence[UUID], why: str) -> None:
    if task_ids:
        await tx.execute(SQL.shelve_tasks, list(task_ids), why)


async def keep_canceled(tx: Transaction, task_id: UUID, why: str) -> None:
    await tx.execute(SQL.keep_canceled, task_id, why)


async def unshelve(tx: Transaction, job_id: UUID) -> list[NewTask]:
    return _new(await tx.fetch(SQL.unshelve_tasks, job_id))


async def superseded(tx: Transaction, task: TaskRow) -> bool:
    """Whether another task of the job covers this PerUpdate task. Called under the job's gate."""
    rows = await tx.fetch(SQL.other_cursor_task, task.job_id, task.task_id, task.seq, task.state.attempt)
    return bool(rows)


async def live_of_jobs(tx: Transaction, job_ids: Sequence[UUID]) -> list[Row]:
    return await tx.fetch(SQL.live_tasks_of_jobs, list(job_ids)) if job_ids else []


async def wake_queued_of_jobs(tx: Transaction, job_ids: Sequence[UUID]) -> list[NewTask]:
    return _new(await tx.fetch(SQL.wake_queued_of_jobs, list(job_ids))) if job_ids else []


def _new(rows: Sequence[Row]) -> list[NewTask]:
    return [NewTask(row["task_id"], row["runtime"], bulk=row["bulk"]) for row in rows]


def _task(row: Row) -> TaskRow:
    kind = TaskKind(row["kind"])
    state = TaskState(
        task_id=row["task_id"],
        kind=kind,
        status=TaskStatus(row["status"]),
        attempt=row["attempt"],
        failures=row["failures"],
        last_outcome=Outcome(row["last_outcome"]) if row["last_outcome"] else None,
        worker_id=row["worker_id"],
        claim_key=row["claim_key"],
        lease_token=row["lease_token"],
        ready_at=row["ready_at"],
        retry=RetryPolicy(
            # A source is restarted for ever, however often it has failed.
            None if kind is TaskKind.SOURCE else row["max_attempts"],
            row["retry_base_seconds"],
            row["retry_max_seconds"],
        ),
        job_active=row["active"],
        job_paused=row["held"],
    )
    scope = BlockRange(row["range_start"], row["range_end"]) if row["range_start"] is not None else None
    return TaskRow(
        state,
        row["seq"],
        row["job_id"],
        scope,
        row["inputs"],
        row["output_revisions"],
        row["lease_expires_at"],
        row["epoch"],
        row["runtime"],
        row["timeout_seconds"],
        row["heartbeat_timeout_seconds"],
        row["idle_timeout_seconds"],
        row["max_concurrency"],
        row["now"],
        row["operator"],
        row["bulk"],
        row["bulk"] or row["priority"] == "bulk",
        row["held"],
        row["max_in_flight"],
    )


async def save_state(tx: Transaction, task: TaskRow, state: Any) -> None:
    """Null deletes the saved state."""
    if state is None:
        await tx.execute(SQL.forget_state, task.job_id, task.task_id)
    else:
        await tx.execute(SQL.save_state, task.task_id, state)


async def saved_state(tx: Transaction, task_id: UUID) -> Any:
    """The state to resume from; None when there is none."""
    row = await tx.fetchrow(SQL.saved_state, task_id)
    return row["value"] if row else None
