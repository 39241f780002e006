"""Explanations: why a task ran, back to the sources, and which tasks and attempts wrote a range of blocks.

Nothing is recorded for this alone. A task's inputs, frozen at its claim, show what it read; the partition that
holds that, or the last event that reached it before then, shows who wrote it. Every query is served by an index, so
that an explanation costs the same however long the chain of blocks is; ``depth`` and ``MAX_TASKS`` limit the number
of queries.

A range is explained by its partitions with their manifests, or for a dataset with a cursor by its events: each is a
commit of the attempt that sent it. Checks, invalidations and gaps of the range come with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET

from tracelake.contracts.coverage import GapQuery
from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.contracts.explain import (
    Cause,
    EarlierAttempt,
    ExplainedTask,
    ExplainRangeQuery,
    RangeExplanation,
    RangeInput,
    RangeInvalidation,
    RangePiece,
    TaskExplanation,
    TaskStep,
)
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import NotFound
from tracelake.postgres import sqlfiles
from tracelake.store import coverage, reads
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "explain.sql")
MAX_TASKS = 100
MAX_EVENTS = 1000
"""Maximum number of a version's events that are searched for one that isn't found by its scope."""
_ATTEMPTS = 5
MAX_INVALIDATIONS = 100
MAX_GAPS = 100
MAX_ATTEMPTS = 1000
MAX_COMMITS = 10_000
_EARLIER = 5


async def task(tx: Transaction, task_id: UUID, depth: int) -> TaskExplanation:
    """The chain of causes, breadth first; each task once, by the attempt that it was first met with."""
    found: dict[UUID, ExplainedTask] = {}
    asked: deque[tuple[UUID, int | None, int]] = deque([(task_id, None, 0)])
    unexplored: dict[UUID, None] = {}
    while asked:
        next_id, attempt, level = asked.popleft()
        # Causes form a graph: two tasks of a chain may have the same cause.
        if next_id in found:
            continue
        # Named but not looked at, so that one request can't walk the whole history.
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
    # Inputs of a superseded attempt are not kept: only the last claim's are frozen in the task.
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
        handovers=_steps(row, attempts, causes),
        causes=causes,
        taken_back=await _own_invalidation(tx, row),
        requested=row["cause"] if row["kind"] == "request" else None,
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
    """A PerPartition task is created when the last of its scopes is committed; an update reads everything committed
    when it is claimed."""
    start, end = task["start"], task["end"]
    after = _number(read.after) if read else None
    upto = _number(read.upto) if read else None
    event = None
    if upto is None or upto != after:
        event = await _find_event(tx, task, attempt, edge["dataset_version"], end if upto is None else upto)
    taken_back = None
    if read is not None and read.invalidation is not None:
        row = await tx.fetchrow(SQL.invalidation_at, edge["dataset_version"], read.invalidation.revision)
        taken_back = _invalidation(row) if row else None
    fields = _event(event)
    if event is None and taken_back is not None:
        # Nothing new was read: the invalidation alone was the cause.
        fields = {"task_id": taken_back.task_id}
    return Cause(
        **edge,
        revision=read.revision if read else None,
        after=after,
        upto=upto,
        start=start,
        end=end,
        **fields,
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


async def _own_invalidation(tx: Transaction, task: Row) -> RangeInvalidation | None:
    """The invalidation that made a task rebuild its own output."""
    cause = task["cause"] or {}
    if cause.get("kind") != "invalidation" or task["start"] is None:
        return None
    version = UUID(cause["dataset_version"])
    rows = await tx.fetch(SQL.invalidations_in, version, task["start"], task["end"], task["created_at"], 1)
    return _invalidation(rows[0]) if rows else None


def _invalidation(row: Row) -> RangeInvalidation:
    return msgspec.convert(dict(row), RangeInvalidation)


def _steps(task: Row, attempts: Sequence[Row], causes: Sequence[Cause]) -> list[TaskStep]:
    """In the order of time. Only the last wake-up is known: earlier ones left no trace."""
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
    steps: list[TaskStep] = []
    for what, at in moments:
        before = steps[-1].at if steps else None
        steps.append(TaskStep(what, at, (at - before).total_seconds() if before else None))
    return steps


def _whole(tasks: Sequence[ExplainedTask]) -> float | None:
    """Seconds from the first step to the last. A source runs forever, so its own times don't count, unless it
    is alone: its events are among the steps of the tasks after it."""
    moments = [
        each.at for task in tasks if task.kind != "source" or len(tasks) == 1 for each in task.handovers
    ]
    ended = tasks[0].handovers[-1].at if tasks[0].handovers else None
    return (ended - min(moments)).total_seconds() if ended and moments else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


async def range_of(tx: Transaction, org_id: UUID, name: str, query: ExplainRangeQuery) -> RangeExplanation:
    _, version = await reads.current_version(tx, org_id, name)
    dataset = await tx.fetchrow(SQL.explained_dataset, version)
    assert dataset is not None
    missing = await coverage.gaps(
        tx, org_id, name, GapQuery(start=query.start, end=query.end, limit=MAX_GAPS, after=UNSET)
    )
    inputs = await tx.fetch(SQL.inputs_of_job, dataset["job_id"])
    pieces: list[RangePiece] = []
    taken_back: list[Row] = []
    searched, following = True, None
    if missing.start is not None and missing.end is not None:
        span = BlockRange(missing.start, missing.end)
        rows = await _partitions(tx, dataset, span, query.limit + 1)
        pieces = [_piece("partition", row, dataset, row["start"]) for row in rows]
        if not pieces:
            commits, searched = await _commits(tx, dataset, span, query.limit + 1)
            pieces = await _commit_pieces(tx, dataset, span, commits)
        if len(pieces) > query.limit:
            following = pieces[query.limit].start
            pieces = pieces[: query.limit]
        taken_back = await tx.fetch(
            SQL.invalidations_in, version, span.start, span.end, None, MAX_INVALIDATIONS
        )
    return RangeExplanation(
        dataset=dataset["dataset"],
        dataset_uuid=dataset["dataset_uuid"],
        dataset_version=version,
        storage=dataset["storage"],
        dag_name=dataset["dag_name"],
        job=dataset["job"],
        operator=dataset["operator"],
        inputs=[msgspec.convert(dict(row), RangeInput) for row in inputs],
        start=missing.start,
        end=missing.end,
        pieces=await _with_earlier_attempts(tx, pieces),
        next=following,
        taken_back=[msgspec.convert(dict(row), RangeInvalidation) for row in taken_back],
        gaps=missing.gaps,
        more_gaps=missing.next is not None,
        searched=searched,
    )


async def _partitions(tx: Transaction, dataset: Row, span: BlockRange, limit: int) -> list[Row]:
    """Stored partitions don't overlap, so the search starts at the first that reaches the range; announcements may,
    and all of these that begin before it are searched."""
    version, begins = dataset["dataset_version"], 0
    if dataset["storage"] != "none":
        first = await tx.fetchrow(coverage.SQL.first_reaching, version, span.start)
        begins = first["range_start"] if first else span.start
    return await tx.fetch(SQL.partitions_in, version, span.start, span.end, begins, limit)


async def _commits(tx: Transaction, dataset: Row, span: BlockRange, limit: int) -> tuple[list[Row], bool]:
    """The commits of a cursor, by attempt, and whether all relevant events were searched."""
    version = dataset["dataset_version"]
    if dataset["source_task"] is not None:
        rows = await tx.fetch(
            SQL.source_commits_in,
            dataset["source_task"],
            version,
            span.start,
            span.end,
            MAX_ATTEMPTS,
            MAX_COMMITS,
        )
        return rows[:limit], all(row["commits"] < MAX_COMMITS for row in rows)
    rows = await tx.fetch(SQL.update_commits_in, version, span.start, span.end, MAX_COMMITS, limit)
    more = await tx.fetchrow(SQL.has_more_events, version, MAX_COMMITS)
    return rows, not (more and more["more"])


async def _commit_pieces(
    tx: Transaction, dataset: Row, span: BlockRange, rows: Sequence[Row]
) -> list[RangePiece]:
    firsts = [row["first_event"] for row in rows]
    before = {
        row["event_id"]: row for row in await tx.fetch(SQL.before_events, dataset["dataset_version"], firsts)
    }
    pieces = []
    for row in rows:
        begins = _begins(before.get(row["first_event"]), row["first"], span.start)
        pieces.append(_piece("commits", row, dataset, begins))
    return pieces


def _begins(before: Row | None, first: int, lowest: int) -> int:
    """The first block of the commit of cursor ``first``, cut to the requested range."""
    if before is None:
        return min(lowest, first)
    behind: int = before["range_end"] + 1 if before["kind"] == "cursor" else before["range_start"]
    return max(min(behind, first), min(lowest, first))


def _piece(kind: str, row: Row, dataset: Row, start: int) -> RangePiece:
    fields: dict[str, Any] = {**row, "kind": kind, "start": start, "earlier_attempts": []}
    fields["verified"] = fields.get("verified") or dataset["verified"]
    return msgspec.convert(fields, RangePiece)


async def _with_earlier_attempts(tx: Transaction, pieces: Sequence[RangePiece]) -> list[RangePiece]:
    wanted = {(p.task_id, p.attempt) for p in pieces if p.task_id is not None and (p.attempt or 0) > 1}
    if not wanted:
        return list(pieces)
    pairs = list(wanted)
    earlier: dict[tuple[UUID, int], list[EarlierAttempt]] = {}
    for row in await tx.fetch(SQL.attempts_before, [p[0] for p in pairs], [p[1] for p in pairs], _EARLIER):
        attempt = EarlierAttempt(row["attempt"], row["worker_id"], row["outcome"], row["error_message"])
        earlier.setdefault((row["task_id"], row["of"]), []).append(attempt)
    return [
        msgspec.structs.replace(
            piece,
            earlier_attempts=earlier.get((piece.task_id, piece.attempt), [])
            if piece.task_id is not None and piece.attempt is not None
            else [],
        )
        for piece in pieces
    ]
