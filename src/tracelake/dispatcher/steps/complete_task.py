"""Step 6, complete: the fence is checked, then outputs, events, routing and the task's end commit together.

Promises: a stale attempt changes nothing at all; the same completion again gets the same answer and changes
nothing; a completion that comes after the reaper gave the attempt up still counts until a newer attempt is claimed.
Several completions share one transaction; each is refused or accepted on its own. When one of them makes the
transaction fail, each is tried alone.

``end_attempts`` writes the end of attempts for all callers, also the reaper: history, the wake-up of a retry, and
the wake-up for the freed slot.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tracelake.contracts.deliveries import MAX_ERROR_CHARS
from tracelake.contracts.dispatcher_api import CompleteRequest, CompleteResponse
from tracelake.dispatcher.steps import commit_outputs, link_partitions
from tracelake.dispatcher.steps.context import StepContext, check_events
from tracelake.dispatcher.steps.count_events import count_events, open_gates
from tracelake.dispatcher.steps.produced_events import ProducedEvent
from tracelake.dispatcher.steps.publish_buffer import retract_buffers
from tracelake.domain.errors import BadRequest, Conflict, Forbidden, Invalid, NotFound, TracelakeError
from tracelake.domain.operators.catalog import DELIVERY
from tracelake.domain.task import Ending, Outcome, TaskKind, TaskStatus, check_may_act, decide_ending
from tracelake.store import datasets, deliveries, outbox, sources, tasks
from tracelake.store.db import LockMissing, Transaction
from tracelake.store.tasks import AttemptEnd, EndedAttempt, NewTask, TaskRow

CompletionAnswer = CompleteResponse | TracelakeError


@dataclass(frozen=True, slots=True)
class _Verified:
    """A completion, and the files that were found for it."""

    request: CompleteRequest
    files: commit_outputs.Files


@dataclass(slots=True)
class _Accepted:
    """A completion that passed its fence."""

    request: CompleteRequest
    task: TaskRow
    produced: list[ProducedEvent]
    outcome: Outcome


async def complete_tasks(ctx: StepContext, requests: Sequence[CompleteRequest]) -> list[CompletionAnswer]:
    """One answer per request, in order: the response, or the error that refuses it."""
    refused: dict[int, TracelakeError] = {}
    verified: list[_Verified] = []
    for index, request in enumerate(requests):
        try:
            verified.append(_Verified(request, await commit_outputs.verify_files(ctx, request)))
        except (Invalid, Forbidden, Conflict) as error:
            refused[index] = error
    answers = await _run(ctx, verified)
    accepted = iter(answers)
    return [refused.get(index) or next(accepted) for index in range(len(requests))]


async def _run(ctx: StepContext, verified: Sequence[_Verified]) -> list[CompletionAnswer]:
    created: list[NewTask] = []

    async def work(tx: Transaction) -> list[CompletionAnswer]:
        created.clear()
        return await _complete(ctx, tx, verified, created)

    if not verified:
        return []
    try:
        with ctx.metrics.timed("complete"):
            answers = await ctx.db.run(work, hot=True)
        ctx.queues.note(created=len(created))
        for answer in answers:
            _count(ctx, answer)
        return answers
    # The transaction is rolled back, so each one can be tried again alone without a trace of the first try.
    except (Invalid, Conflict) as error:
        if len(verified) == 1:
            return [error]
    return [answer for entry in verified for answer in await _run(ctx, [entry])]


def _count(ctx: StepContext, answer: CompletionAnswer) -> None:
    if isinstance(answer, TracelakeError):
        ctx.metrics.completions.labels(answer.reason).inc()
        return
    ctx.metrics.completions.labels(answer.status).inc()
    if answer.retry_at is not None:
        ctx.metrics.retries.inc()


async def _complete(
    ctx: StepContext, tx: Transaction, verified: Sequence[_Verified], created: list[NewTask]
) -> list[CompletionAnswer]:
    requests = [entry.request for entry in verified]
    rows = await tasks.lock(tx, {request.task_id for request in requests})
    answers: dict[int, CompletionAnswer] = {}
    accepted: dict[int, _Accepted] = {}
    first: dict[UUID, int] = {}
    same: dict[int, int] = {}
    for index, entry in enumerate(verified):
        task_id = entry.request.task_id
        try:
            if task_id in first and requests[first[task_id]] == entry.request:
                same[index] = first[task_id]
            elif task_id in first:
                raise Conflict("StaleLease", "the batch has two different completions of this attempt")
            else:
                # Only an accepted one is first: a refused one must
                # not make a good one after it look like a conflict.
                accepted[index] = await _accept(ctx, tx, rows.get(task_id), entry)
                first[task_id] = index
        except TracelakeError as error:
            answers[index] = error
    # Refused first, then looked up: a repeat is rare, and the history costs a query.
    answers |= await _repeats(tx, requests, answers, rows)
    answers |= await _commit(ctx, tx, accepted, created)
    return [answers[same.get(index, index)] for index in range(len(requests))]


async def _accept(ctx: StepContext, tx: Transaction, task: TaskRow | None, verified: _Verified) -> _Accepted:
    request = verified.request
    if task is None:
        raise NotFound("UnknownTask", f"there is no task {request.task_id}")
    if request.attempt is None or request.lease_token is None:
        raise BadRequest("FenceMissing", "a completion needs 'attempt' and 'lease_token'")
    check_may_act(task.state, request.attempt, request.lease_token)
    outcome = Outcome(request.status)
    if outcome is not Outcome.COMPLETED:
        if request.outputs:
            raise Invalid("OutputsNotCommitted", f"a task that is {request.status} has no outputs to commit")
        if request.events:
            raise Invalid(
                "EventsNotCounted", f"final events belong to a completed task, not a {request.status} one"
            )
        return _Accepted(request, task, [], outcome)
    if ctx.emissions.known(task):
        await check_events(ctx.emissions, tx, task, len(request.events))
    definition = (await ctx.definitions.get(tx, [task.job_id]))[task.job_id]
    produced = await commit_outputs.produced_by_completion(tx, task, definition, request, verified.files)
    return _Accepted(request, task, produced, outcome)


async def _repeats(
    tx: Transaction,
    requests: Sequence[CompleteRequest],
    answers: dict[int, CompletionAnswer],
    rows: dict[UUID, TaskRow],
) -> dict[int, CompletionAnswer]:
    """Answers to refused completions that repeat an accepted one, or report the end of a canceled task."""
    known: dict[int, CompletionAnswer] = {}
    asked = [(i, requests[i]) for i in answers if rows.get(requests[i].task_id)]
    keys = [(request.task_id, request.attempt or 0) for _, request in asked]
    history = await tasks.ended_attempts(tx, keys) if keys else {}
    for (index, request), key in zip(asked, keys, strict=True):
        task, ended = rows[request.task_id], history.get(key)
        if task.state.status is TaskStatus.CANCELED and request.status == "Canceled":
            known[index] = CompleteResponse(request.task_id, "Canceled", request.attempt, "Canceled")
        # Another result for an attempt that has ended is not a repeat, whatever its fence is.
        elif ended is not None and ended.digest is not None and ended.digest == _digest(request):
            known[index] = _repeated(request, ended)
    return known


def _repeated(request: CompleteRequest, ended: EndedAttempt) -> CompletionAnswer:
    if ended.outcome is Outcome.INPUT_CHANGED:
        return _input_changed(request.task_id)
    return _response(request, ended.result or {})


async def _commit(
    ctx: StepContext, tx: Transaction, accepted: dict[int, _Accepted], created: list[NewTask]
) -> dict[int, CompletionAnswer]:
    if not accepted:
        return {}
    completed = [entry.task for entry in accepted.values() if entry.outcome is Outcome.COMPLETED]
    # Before the gates, since an invalidation needs more of them than a commit.
    suspected = await link_partitions.unlinked(tx, _produced(accepted.values()))
    for entry in accepted.values():
        entry.produced += [event for event in suspected if event.producer.task_id == entry.task.task_id]
    gates = await open_gates(
        tx,
        [event for entry in accepted.values() for event in entry.produced],
        own_jobs={entry.task.job_id for entry in accepted.values() if entry.task.gated},
        inputs={version for task in completed for version in commit_outputs.used_versions(task)},
    )
    # Under the gates: an invalidation that commits later finds this completion, one before is found here.
    refused = await _refuse(tx, accepted, completed, gates.versions)
    lasting = {index: entry for index, entry in accepted.items() if index not in refused}
    committing = _produced(lasting.values())
    # Again, and now nobody can commit a neighbour: one that was committed or invalidated since needs other gates.
    if await link_partitions.unlinked(tx, committing) != [
        event for event in suspected if event in committing
    ]:
        raise LockMissing("a neighbour of a partition was committed or invalidated meanwhile")
    done = [entry for entry in lasting.values() if entry.outcome is Outcome.COMPLETED]
    await datasets.advance_consumers(
        tx, [move for entry in done for move in commit_outputs.consumed(entry.task)]
    )
    await retract_buffers(ctx, tx, [entry.task for entry in done])
    ended = await end_attempts(ctx, tx, [_over(ctx, entry) for entry in lasting.values()])
    counted = await count_events(
        ctx,
        tx,
        [event for entry in done for event in entry.produced],
        gates,
        ended_updates={entry.task.job_id for entry in done if entry.task.state.kind is TaskKind.CURSOR},
    )
    created += counted.created
    answers: dict[int, CompletionAnswer] = dict(refused)
    for (index, entry), end in zip(lasting.items(), ended, strict=True):
        answers[index] = _answer(entry, end)
    return answers


def _produced(entries: Iterable[_Accepted]) -> list[ProducedEvent]:
    return [event for entry in entries for event in entry.produced]


async def _refuse(
    tx: Transaction,
    accepted: dict[int, _Accepted],
    completed: Sequence[TaskRow],
    versions: dict[UUID, datasets.Version],
) -> dict[int, TracelakeError]:
    """Completions that can't be committed. One with changed inputs goes on as an attempt that ended so."""
    refused: dict[int, TracelakeError] = {}
    for index, entry in accepted.items():
        if _late_update(entry.task) and await tasks.superseded(tx, entry.task):
            refused[index] = Conflict("StaleAttempt", "a later task of this job was claimed meanwhile")
            entry.produced = []
    changed = await commit_outputs.with_changed_inputs(tx, completed, versions)
    for entry in accepted.values():
        if entry.task.task_id in changed:
            entry.outcome, entry.produced = Outcome.INPUT_CHANGED, []
    cut = await commit_outputs.uncovered(tx, [e for a in accepted.values() for e in a.produced], versions)
    overlaps: dict[int, TracelakeError] = {
        index: Invalid("PartitionOverlap", cut[entry.task.task_id])
        for index, entry in accepted.items()
        if entry.task.task_id in cut
    }
    return overlaps | refused


def _late_update(task: TaskRow) -> bool:
    """A PerUpdate task that was given up: another may have been claimed for its range, like a newer attempt."""
    return task.state.kind is TaskKind.CURSOR and task.state.status is not TaskStatus.RUNNING


def _over(ctx: StepContext, entry: _Accepted) -> AttemptOver:
    return AttemptOver(
        entry.task,
        entry.outcome,
        entry.request.error_message,
        entry.request.retryable and not ctx.emissions.refused(entry.task),
        _digest(entry.request),
    )


def _answer(entry: _Accepted, ended: EndedTask) -> CompletionAnswer:
    if entry.outcome is Outcome.INPUT_CHANGED:
        return _input_changed(entry.task.task_id)
    return _response(entry.request, ended.result)


def _response(request: CompleteRequest, result: dict[str, object]) -> CompleteResponse:
    return msgspec.convert(
        {"task_id": request.task_id, "attempt": request.attempt, **result}, CompleteResponse
    )


def _input_changed(task_id: UUID) -> Conflict:
    return Conflict(
        "InputChanged",
        f"an input of task {task_id} was invalidated or filled in meanwhile; it is queued again",
    )


def _digest(request: CompleteRequest) -> bytes:
    return hashlib.sha256(msgspec.json.encode(request)).digest()


@dataclass(frozen=True, slots=True)
class AttemptOver:
    task: TaskRow
    outcome: Outcome
    error_message: str | None = None
    retryable: bool = True
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class EndedTask:
    ending: Ending
    result: dict[str, Any]


async def end_attempts(ctx: StepContext, tx: Transaction, over: Sequence[AttemptOver]) -> list[EndedTask]:
    """Write the endings of locked tasks whose gates are held, in the order given."""
    endings = [
        decide_ending(end.task.state, end.outcome, retryable=end.retryable, jitter=ctx.entropy.jitter())
        for end in over
    ]
    written = await tasks.end_attempts(
        tx,
        [
            AttemptEnd(
                end.task.task_id,
                ending,
                end.error_message,
                end.digest,
                {"status": end.outcome.value, "task_status": ending.status.value},
            )
            for end, ending in zip(over, endings, strict=True)
        ],
    )
    again: list[NewTask] = []
    times: list[datetime | None] = []
    for end, ending in zip(over, endings, strict=True):
        if ending.status is TaskStatus.QUEUED:
            again.append(NewTask(end.task.task_id, end.task.runtime, bulk=end.task.is_bulk))
            times.append(written[end.task.task_id][1])
    await outbox.wake(tx, again, times)
    # A request is its source's: what a retired generation leaves undone, the active one runs.
    shelved = [
        end.task.task_id
        for end, ending in zip(over, endings, strict=True)
        if ending.shelved and end.task.state.kind is TaskKind.REQUEST
    ]
    await sources.reopen(tx, shelved)
    failed = [
        (end.task.job_id, (end.error_message or end.outcome.value)[:MAX_ERROR_CHARS])
        for end in over
        if end.task.operator == DELIVERY and end.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
    ]
    if failed:
        await deliveries.note_failures(tx, failed)
    await wake_next(ctx, tx, [end.task for end in over])
    return [
        EndedTask(ending, written[end.task.task_id][0]) for end, ending in zip(over, endings, strict=True)
    ]


async def wake_next(ctx: StepContext, tx: Transaction, freed: Sequence[TaskRow]) -> None:
    """Wake the next parked task of each job in which one of these tasks has freed a slot.

    The gates of those jobs are held, so a claim that found the job full either came before, and its task is parked,
    or comes after, and finds the slot.
    """
    capped = Counter(task.operator for task in freed if task.operator_cap is not None)
    slots = Counter(task.job_id for task in freed if task.gated and task.operator_cap is None)
    max_bulk_wait = ctx.pressure.max_bulk_wait.total_seconds()
    await outbox.wake(tx, await tasks.wake_parked(tx, dict(slots), max_bulk_wait))
    await outbox.wake(tx, await tasks.wake_parked_of_operators(tx, dict(capped), max_bulk_wait))
