"""Step 6, complete: the fence is checked, then outputs, events, routing and the task's end commit together.

Promises: a stale attempt changes nothing at all; the same completion again gets the same answer and changes
nothing; a reply that comes after the reaper gave the attempt up still counts until a newer one is claimed.
Several completions share one transaction; each is refused or accepted on its own. When one of them upsets
the transaction, each is tried alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import CompleteRequest, CompleteResponse
from tracelake.dispatcher.steps import commit_outputs
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.count_events import count_events, open_gates
from tracelake.dispatcher.steps.emission_caps import check_events
from tracelake.dispatcher.steps.end_attempts import AttemptOver, Ended, end_attempts
from tracelake.dispatcher.steps.produced_events import ProducedEvent
from tracelake.dispatcher.steps.retract_buffers import retract_buffers
from tracelake.domain.errors import BadRequest, Conflict, Forbidden, Invalid, NotFound, TracelakeError
from tracelake.domain.task import Outcome, TaskKind, TaskStatus, check_may_act
from tracelake.store import datasets, tasks
from tracelake.store.db import Transaction
from tracelake.store.tasks import EndedAttempt, TaskRow

Answer = CompleteResponse | TracelakeError


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


async def complete_tasks(ctx: StepContext, requests: Sequence[CompleteRequest]) -> list[Answer]:
    """One answer per request, in order: what was accepted, or why it wasn't."""
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


async def _run(ctx: StepContext, verified: Sequence[_Verified]) -> list[Answer]:
    async def work(tx: Transaction) -> list[Answer]:
        return await _complete(ctx, tx, verified)

    if not verified:
        return []
    try:
        with ctx.metrics.timed("complete"):
            answers = await ctx.db.run(work, hot=True)
        for answer in answers:
            _count(ctx, answer)
        return answers
    except (Invalid, Conflict) as error:
        if len(verified) == 1:
            return [error]
    return [answer for entry in verified for answer in await _run(ctx, [entry])]


def _count(ctx: StepContext, answer: Answer) -> None:
    if isinstance(answer, TracelakeError):
        ctx.metrics.completions.labels(answer.reason).inc()
        return
    ctx.metrics.completions.labels(answer.status).inc()
    if answer.retry_at is not None:
        ctx.metrics.retries.inc()


async def _complete(ctx: StepContext, tx: Transaction, verified: Sequence[_Verified]) -> list[Answer]:
    requests = [entry.request for entry in verified]
    rows = await tasks.lock(tx, {request.task_id for request in requests})
    answers: dict[int, Answer] = {}
    accepted: dict[int, _Accepted] = {}
    first: dict[UUID, int] = {}
    same: dict[int, int] = {}
    for index, entry in enumerate(verified):
        task_id = entry.request.task_id
        try:
            if task_id in first and requests[first[task_id]] == entry.request:
                same[index] = first[task_id]
            elif task_id in first:
                raise Conflict("StaleLease", "the call ends this attempt in two ways")
            else:
                accepted[index] = await _accept(ctx, tx, rows.get(task_id), entry)
                first[task_id] = index
        except TracelakeError as error:
            answers[index] = error
    answers |= await _repeats(tx, requests, answers, rows)
    answers |= await _commit(ctx, tx, accepted)
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
    card = (await ctx.cards.get(tx, [task.job_id]))[task.job_id]
    produced = await commit_outputs.produced_by_completion(tx, task, card, request, verified.files)
    return _Accepted(request, task, produced, outcome)


async def _repeats(
    tx: Transaction,
    requests: Sequence[CompleteRequest],
    answers: dict[int, Answer],
    rows: dict[UUID, TaskRow],
) -> dict[int, Answer]:
    """Among the refused: those that say again what was accepted before, and cancellations of the canceled."""
    known: dict[int, Answer] = {}
    asked = [(i, requests[i]) for i in answers if rows.get(requests[i].task_id)]
    keys = [(request.task_id, request.attempt or 0) for _, request in asked]
    history = await tasks.ended_attempts(tx, keys) if keys else {}
    for (index, request), key in zip(asked, keys, strict=True):
        task, ended = rows[request.task_id], history.get(key)
        if task.state.status is TaskStatus.CANCELED and request.status == "Canceled":
            known[index] = CompleteResponse(request.task_id, "Canceled", request.attempt, "Canceled")
        elif ended is not None and ended.digest is not None and ended.digest == _digest(request):
            known[index] = _repeated(request, ended)
    return known


def _repeated(request: CompleteRequest, ended: EndedAttempt) -> Answer:
    if ended.outcome is Outcome.INPUT_CHANGED:
        return _input_changed(request.task_id)
    return _response(request, ended.result or {})


async def _commit(ctx: StepContext, tx: Transaction, accepted: dict[int, _Accepted]) -> dict[int, Answer]:
    if not accepted:
        return {}
    completed = [entry.task for entry in accepted.values() if entry.outcome is Outcome.COMPLETED]
    gates = await open_gates(
        tx,
        [event for entry in accepted.values() for event in entry.produced],
        own_jobs={entry.task.job_id for entry in accepted.values() if entry.task.gated},
        inputs={version for task in completed for version in commit_outputs.used_versions(task)},
    )
    refused = await _refuse(tx, accepted, completed, gates.versions)
    lasting = {index: entry for index, entry in accepted.items() if index not in refused}
    done = [entry for entry in lasting.values() if entry.outcome is Outcome.COMPLETED]
    await datasets.advance_consumers(
        tx, [move for entry in done for move in commit_outputs.consumed(entry.task)]
    )
    await retract_buffers(ctx, tx, [entry.task for entry in done])
    ended = await end_attempts(ctx, tx, [_over(ctx, entry) for entry in lasting.values()])
    await count_events(
        ctx,
        tx,
        [event for entry in done for event in entry.produced],
        gates,
        ended_updates={entry.task.job_id for entry in done if entry.task.state.kind is TaskKind.CURSOR},
    )
    answers: dict[int, Answer] = dict(refused)
    for (index, entry), end in zip(lasting.items(), ended, strict=True):
        answers[index] = _answer(entry, end)
    return answers


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
    overlap = Invalid("PartitionOverlap", "a partition must cover the current ones that it touches")
    return {index: overlap for index, entry in accepted.items() if entry.task.task_id in cut} | refused


def _late_update(task: TaskRow) -> bool:
    """A PerUpdate task that was given up: another may have taken its range over, as a newer attempt would."""
    return task.state.kind is TaskKind.CURSOR and task.state.status is not TaskStatus.RUNNING


def _over(ctx: StepContext, entry: _Accepted) -> AttemptOver:
    return AttemptOver(
        entry.task,
        entry.outcome,
        entry.request.error_message,
        entry.request.retryable and not ctx.emissions.refused(entry.task),
        _digest(entry.request),
    )


def _answer(entry: _Accepted, ended: Ended) -> Answer:
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
