"""Why a task ran: the events that caused it, the attempts that said them, and so on back to the sources.

Nothing is recorded for this alone. A task's inputs, frozen at its claim, say what it read; the partition that holds
it, or the last event that reached it before then, says who wrote that. Every look is served by an index, so that
explaining costs the same however long the chain of blocks is; the number of looks is bounded by ``depth`` and
``MAX_TASKS``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tracelake import sqlfiles
from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.contracts.explain import Cause, ExplainedTask, Handover, TakenBack, TaskExplanation
from tracelake.domain.errors import NotFound
from tracelake.store import reads
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "explain.sql")

MAX_TASKS = 100
MAX_EVENTS = 1000
"""How many events of a version are looked through for the one that isn't found by its scope."""

_ATTEMPTS = 5


async def task(tx: Transaction, task_id: UUID, depth: int) -> TaskExplanation:
    """The chain of causes, breadth first; each task once, by the attempt that it was first met with."""
    found: dict[UUID, ExplainedTask] = {}
    asked: deque[tuple[UUID, int | None, int]] = deque([(task_id, None, 0)])
    unexplored: dict[UUID, None] = {}
    while asked:
        next_id, attempt, level = asked.popleft()
        if next_id in found:
            continue
        if level >= depth or len(found) >= MAX_TASKS:
            unexplored[next_id] = None
            continue
        explained = await _explain(tx, next_id, attempt, level)
        found[next_id] = explained
        for cause in explained.causes:
            if cause.task_id is not None:
                asked.append((cause.task_id, cause.attempt, level + 1))
    first = found[task_id]
    waiting = (await reads.task(tx, task_id)).waiting_for if first.status == "Queued" else None
    return TaskExplanation(
        task_id=task_id,
        depth=depth,
        tasks=list(found.values()),
        unexplored=[each for each in unexplored if each not in found],
        waiting_for=waiting,
        seconds=_whole(list(found.values())),
    )


async def _explain(tx: Transaction, task_id: UUID, attempt: int | None, level: int) -> ExplainedTask:
    row = await tx.fetchrow(SQL.explained_task, task_id)
    if row is None:
        raise NotFound("UnknownTask", f"there is no task {task_id}")
    number = row["attempt"] if attempt is None else attempt
    attempts = await tx.fetch(SQL.attempts_upto, task_id, number, _ATTEMPTS)
    current = attempts[0] if attempts else None
    # What a superseded attempt read is not kept: only the last claim's inputs are frozen in the task.
    frozen = row["inputs"] if number == row["attempt"] else None
    causes = await _causes(tx, row, current, frozen or [])
    return ExplainedTask(
        task_id=task_id,
        dag_name=row["dag_name"],
        job=row["job"],
        operator=row["operator"],
        runtime=row["runtime"],
        kind=row["kind"],
        status=row["status"],
        attempt=number,
        worker_id=current["worker_id"] if current else None,
        outcome=current["outcome"] if current else None,
        error_message=current["error_message"] if current else row["error_message"],
        start=row["start"],
        end=row["end"],
        because=(row["cause"] or {}).get("kind"),
        depth=level,
        handovers=_handovers(row, attempts, causes),
        causes=causes,
        taken_back=await _own_taken_back(tx, row),
    )


async def _causes(tx: Transaction, task: Row, attempt: Row | None, frozen: Sequence[Any]) -> list[Cause]:
    by_index = {each.input_index: each for each in msgspec.convert(frozen, list[PayloadInput])}
    return [
        await _cause(tx, task, attempt, edge, by_index.get(edge["input_index"]))
        for edge in await tx.fetch(SQL.triggering_inputs, task["job_id"])
    ]


async def _cause(
    tx: Transaction, task: Row, attempt: Row | None, edge: Row, read: PayloadInput | None
) -> Cause:
    """A PerPartition task was created when the last of its scopes was there; an update reads what is there when it
    is claimed."""
    start, end = task["start"], task["end"]
    after = _number(read.after) if read else None
    upto = _number(read.upto) if read else None
    event = None
    if upto is None or upto != after:
        event = await _find_event(tx, task, attempt, edge["dataset_version"], end if upto is None else upto)
    taken_back = None
    if read is not None and read.invalidation is not None:
        row = await tx.fetchrow(SQL.taken_back_at, edge["dataset_version"], read.invalidation.revision)
        taken_back = _taken_back(row) if row else None
    said = _event(event)
    if event is None and taken_back is not None:
        # Nothing new was read: what was taken back is all that there was to do.
        said = {"task_id": taken_back.task_id}
    return Cause(
        **edge,
        revision=read.revision if read else None,
        after=after,
        upto=upto,
        start=start,
        end=end,
        **said,
        taken_back=taken_back,
    )


async def _find_event(
    tx: Transaction, task: Row, attempt: Row | None, version: UUID, last: int | None
) -> Row | None:
    claimed: datetime = attempt["claimed_at"] if attempt else task["now"]
    if last is not None:
        found = await tx.fetchrow(SQL.event_of_partition, version, task["start"], last, claimed)
        if found is not None:
            return found
    moment = task["created_at"] if task["kind"] == "partition" else claimed
    return await tx.fetchrow(SQL.event_before, version, moment, task["start"], last, MAX_EVENTS)


def _event(row: Row | None) -> dict[str, Any]:
    if row is None:
        return {}
    return {
        "event_id": row["event_id"],
        "event_kind": row["kind"],
        "event_start": row["range_start"],
        "event_end": row["range_end"],
        "recorded_at": row["created_at"],
        "task_id": row["task_id"],
        "attempt": row["attempt"],
    }


async def _own_taken_back(tx: Transaction, task: Row) -> TakenBack | None:
    """Of a task that makes its own output again: the invalidation that asked for it."""
    cause = task["cause"] or {}
    if cause.get("kind") != "invalidation" or task["start"] is None:
        return None
    version = UUID(cause["dataset_version"])
    rows = await tx.fetch(SQL.taken_back_in, version, task["start"], task["end"], task["created_at"], 1)
    return _taken_back(rows[0]) if rows else None


def _taken_back(row: Row) -> TakenBack:
    return msgspec.convert(dict(row), TakenBack)


def _handovers(task: Row, attempts: Sequence[Row], causes: Sequence[Cause]) -> list[Handover]:
    """In the order of time. A wake-up is only known by the last one: earlier ones left no trace."""
    moments = [
        (f"event {cause.event_id} recorded", cause.recorded_at)
        for cause in causes
        if cause.recorded_at is not None
    ]
    moments.append(("task created", task["created_at"]))
    for each in attempts:
        moments.append((f"attempt {each['attempt']} claimed by {each['worker_id']}", each["claimed_at"]))
        if each["ended_at"] is not None:
            moments.append((f"attempt {each['attempt']} ended: {each['outcome']}", each["ended_at"]))
    last = max((at for _, at in moments), default=task["created_at"])
    if task["status"] == "Queued" and task["now"] >= task["woken_at"] > last:
        moments.append(("woken again", task["woken_at"]))
    if task["status"] == "Canceled" and task["ended_at"] is not None and task["ended_at"] > last:
        moments.append(("canceled", task["ended_at"]))
    moments.sort(key=lambda moment: moment[1])
    told: list[Handover] = []
    for what, at in moments:
        before = told[-1].at if told else None
        told.append(Handover(what, at, (at - before).total_seconds() if before else None))
    return told


def _whole(tasks: Sequence[ExplainedTask]) -> float | None:
    """A source runs for ever: what counts of it is what it said, which the tasks after it tell."""
    moments = [
        each.at for task in tasks if task.kind != "source" or len(tasks) == 1 for each in task.handovers
    ]
    ended = tasks[0].handovers[-1].at if tasks[0].handovers else None
    return (ended - min(moments)).total_seconds() if ended and moments else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
