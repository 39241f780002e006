"""Step 4, claim: Queued becomes Running, with a lease, an epoch and the payload.

Promises: one holder per attempt, however many workers claim it; a repeat with the same ``claim_key`` gets the same
lease; a cap is never exceeded, because claims of capped jobs lock the job's row before they count. Several claims
share one transaction; each is decided on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from tracelake.contracts.dispatcher_api import (
    ClaimRequest,
    ClaimResponse,
    NotClaimedReason,
    PayloadInput,
    TaskPayload,
)
from tracelake.dispatcher.steps import render_payload
from tracelake.dispatcher.steps.buffered_datasets import sink_config
from tracelake.dispatcher.steps.complete_task import wake_next
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deliveries import delivery_config
from tracelake.dispatcher.steps.render_payload import issue_token
from tracelake.domain.task import ClaimGate, ClaimVerdict, TaskKind, TaskStatus, decide_claim
from tracelake.store import invalidations, jobs, sources, tasks
from tracelake.store.db import Row, Transaction
from tracelake.store.invalidations import SourcePosition
from tracelake.store.tasks import AttemptStart, StartedAttempt, TaskRow

_REFUSALS: dict[ClaimVerdict, NotClaimedReason] = {
    ClaimVerdict.ALREADY_RUNNING: "AlreadyRunning",
    ClaimVerdict.COMPLETED: "Completed",
    ClaimVerdict.CANCELED: "Canceled",
    ClaimVerdict.SUPERSEDED: "Canceled",
    ClaimVerdict.NOT_FOUND: "NotFound",
    ClaimVerdict.FAILED: "Failed",
    ClaimVerdict.NOT_READY: "NotReady",
}
_GRANTS = (ClaimVerdict.CLAIM, ClaimVerdict.SAME_LEASE)


@dataclass(frozen=True, slots=True)
class _Granted:
    """A lease, new or repeated, before its token is signed."""

    org_id: UUID
    payload: TaskPayload
    lease_token: UUID
    lease_expires_at: datetime
    now: datetime


async def claim_tasks(ctx: StepContext, claims: Sequence[ClaimRequest]) -> list[ClaimResponse]:
    async def work(tx: Transaction) -> list[_Granted | ClaimVerdict]:
        return await _claim(ctx, tx, claims)

    with ctx.metrics.timed("claim"):
        # Tokens are signed after the commit: no row lock is held meanwhile.
        decided = await ctx.db.run(work, hot=True)
    granted = [result for result in decided if isinstance(result, _Granted)]
    ctx.queues.note(claimed=len(granted))
    # A source with code keeps requests for which its own queue has no room.
    if any(result.payload.source is not None for result in granted):
        ctx.waiting_requests.set()
    return [await _answer(ctx, claim, result) for claim, result in zip(claims, decided, strict=True)]


async def _answer(ctx: StepContext, claim: ClaimRequest, result: _Granted | ClaimVerdict) -> ClaimResponse:
    if not isinstance(result, _Granted):
        ctx.metrics.claims.labels(_REFUSALS[result]).inc()
        return ClaimResponse("NotClaimed", claim.task_id, reason=_REFUSALS[result])
    ctx.metrics.claims.labels("Claimed").inc()
    return ClaimResponse(
        "Claimed",
        claim.task_id,
        attempt=result.payload.attempt,
        lease_token=result.lease_token,
        lease_expires_at=result.lease_expires_at,
        capability_token=await issue_token(ctx, result.org_id, result.payload, result.now),
        task=result.payload,
    )


async def _claim(
    ctx: StepContext, tx: Transaction, claims: Sequence[ClaimRequest]
) -> list[_Granted | ClaimVerdict]:
    # Tasks before jobs, as everywhere. The gates are read under the
    # jobs' locks, or two claims would each see the last free slot.
    rows = await tasks.lock(tx, {claim.task_id for claim in claims})
    gates = await _gates(tx, list(rows.values()))
    queued = [row for row in rows.values() if row.state.status is TaskStatus.QUEUED]
    reads = await tasks.claim_inputs(tx, queued) if queued else {}
    gates = _with_inputs(gates, reads)
    verdicts = _decide(claims, rows, gates)
    superseded = [c.task_id for c, v in zip(claims, verdicts, strict=True) if v is ClaimVerdict.SUPERSEDED]
    await tasks.cancel(tx, superseded, "a later task covers the same scope")
    await _pass_slots_on(ctx, tx, claims, rows, gates, verdicts)
    granted = [c for c, v in zip(claims, verdicts, strict=True) if v in _GRANTS]
    definitions = await ctx.definitions.get(tx, (rows[claim.task_id].job_id for claim in granted))
    started = await _start(ctx, tx, claims, rows, verdicts, reads)
    requested = [task.task_id for task, *_ in started.values() if task.state.kind is TaskKind.REQUEST]
    requests = await sources.requests_of(tx, requested)
    results: list[_Granted | ClaimVerdict] = []
    for claim, verdict in zip(claims, verdicts, strict=True):
        if verdict in _GRANTS:
            task, inputs, lease_token, attempt = started[claim.task_id]
            definition = definitions[task.job_id]
            payload = render_payload.render(
                ctx,
                task,
                definition,
                inputs,
                attempt.outputs,
                attempt=attempt.attempt,
                epoch=attempt.epoch,
                state=attempt.state,
                written=await _written(tx, task),
                config=await sink_config(ctx, tx, definition) or await delivery_config(tx, definition),
                request=requests.get(task.task_id),
            )
            results.append(
                _Granted(definition.org_id, payload, lease_token, attempt.lease_expires_at, task.now)
            )
        else:
            results.append(verdict)
    return results


async def _gates(tx: Transaction, rows: Sequence[TaskRow]) -> dict[UUID, ClaimGate]:
    gated = [row for row in rows if row.gated]
    if not gated:
        return {}
    await tasks.lock_gates(tx, (row.job_id for row in gated))
    return await tasks.claim_gates(tx, gated)


async def _pass_slots_on(
    ctx: StepContext,
    tx: Transaction,
    claims: Sequence[ClaimRequest],
    rows: dict[UUID, TaskRow],
    gates: dict[UUID, ClaimGate],
    verdicts: Sequence[ClaimVerdict],
) -> None:
    """A refused claim has used up its wake-up. A task whose job is full is parked until the next free slot; one
    that can't run for another reason leaves the slot that it may have been woken for to the next in line."""
    refused = {claim.task_id: verdict for claim, verdict in zip(claims, verdicts, strict=True)}
    queued = [row for row in rows.values() if row.state.status is TaskStatus.QUEUED]
    gated = [row for row in queued if row.gated or row.held]
    parked = [
        row
        for row in gated
        if refused[row.task_id] is ClaimVerdict.NOT_READY and gates[row.task_id].inputs_committed
    ]
    out = [
        row
        for row in queued
        if refused[row.task_id] is ClaimVerdict.SUPERSEDED or not gates[row.task_id].inputs_committed
    ]
    # They don't wait for a worker, and their producers must not be held because of them.
    await tasks.stall(tx, [row.task_id for row in out if refused[row.task_id] is not ClaimVerdict.SUPERSEDED])
    await tasks.park(tx, [row.task_id for row in parked])
    await wake_next(ctx, tx, out)


def _with_inputs(gates: dict[UUID, ClaimGate], reads: dict[UUID, list[Row]]) -> dict[UUID, ClaimGate]:
    """The gates with the state of the tasks' inputs: a scope may have been invalidated meanwhile."""
    return gates | {
        task_id: replace(
            gates.get(task_id, ClaimGate()),
            inputs_committed=all(row["committed"] for row in inputs),
            superseded=any(row["superseded"] for row in inputs),
        )
        for task_id, inputs in reads.items()
    }


def _decide(
    claims: Sequence[ClaimRequest], rows: dict[UUID, TaskRow], gates: dict[UUID, ClaimGate]
) -> list[ClaimVerdict]:
    """One verdict per claim. Slots taken by earlier claims of the call count for the later ones."""
    taken: Counter[UUID] = Counter()
    of_operator: Counter[str] = Counter()
    claimed: dict[UUID, ClaimRequest] = {}
    verdicts = []
    for claim in claims:
        row = rows.get(claim.task_id)
        # The row was read before this call's first claim of it, so it still looks queued.
        if claim.task_id in claimed:
            first = claimed[claim.task_id]
            same = claim.claim_key is not None and claim == first
            verdicts.append(ClaimVerdict.SAME_LEASE if same else ClaimVerdict.ALREADY_RUNNING)
            continue
        if row is None:
            verdicts.append(ClaimVerdict.NOT_FOUND)
            continue
        gate = gates.get(claim.task_id, ClaimGate())
        gate = replace(
            gate,
            running=gate.running + taken[row.job_id],
            in_flight=gate.in_flight + of_operator[row.operator],
        )
        verdict = decide_claim(
            row.state, gate, worker_id=claim.worker_id, claim_key=claim.claim_key, now=row.now
        )
        if verdict is ClaimVerdict.CLAIM:
            taken[row.job_id] += 1
            of_operator[row.operator] += 1
            claimed[claim.task_id] = claim
        verdicts.append(verdict)
    return verdicts


async def _written(tx: Transaction, task: TaskRow) -> dict[UUID, SourcePosition]:
    """The position of a source in its outputs. Read after their revisions: an invalidation in between makes the
    source repeat work, and never lets it skip an invalidated range."""
    if task.state.kind is not TaskKind.SOURCE:
        return {}
    return await invalidations.written_by_source(tx, task.job_id, task.task_id)


_Started = tuple[TaskRow, list[PayloadInput], UUID, StartedAttempt]


async def _start(
    ctx: StepContext,
    tx: Transaction,
    claims: Sequence[ClaimRequest],
    rows: dict[UUID, TaskRow],
    verdicts: Sequence[ClaimVerdict],
    reads: dict[UUID, list[Row]],
) -> dict[UUID, _Started]:
    """Start the new attempts; repeated leases are returned unchanged."""
    started: dict[UUID, _Started] = {}
    new: dict[UUID, ClaimRequest] = {}
    for claim, verdict in zip(claims, verdicts, strict=True):
        if verdict is ClaimVerdict.CLAIM:
            new[claim.task_id] = claim
        # A repeat within the call gets the lease that the call itself is about to start.
        elif verdict is ClaimVerdict.SAME_LEASE and claim.task_id not in new:
            started[claim.task_id] = await _held(tx, rows[claim.task_id])
    if not new:
        return started
    claimed = [rows[task_id] for task_id in new]
    frozen = {task_id: render_payload.freeze_inputs(rows[task_id], reads[task_id]) for task_id in new}
    starts = [
        AttemptStart(
            task.task_id,
            task.job_id,
            new[task.task_id].worker_id,
            new[task.task_id].claim_key,
            ctx.entropy.uuid(),
            render_payload.to_json(frozen[task.task_id]),
            ctx.runtimes.lease_seconds(task),
        )
        for task in claimed
    ]
    attempts = await tasks.start_attempts(tx, starts)
    for start in starts:
        task = rows[start.task_id]
        started[start.task_id] = (task, frozen[start.task_id], start.lease_token, attempts[start.task_id])
    return started


async def _held(tx: Transaction, task: TaskRow) -> _Started:
    assert task.state.lease_token is not None
    assert task.lease_expires_at is not None
    assert task.epoch is not None
    inputs = render_payload.from_json(task.inputs or [])
    outputs = await jobs.output_state(tx, [task.job_id])
    # A first attempt has no predecessor that could have saved anything.
    saved = await tasks.saved_state(tx, task.task_id) if task.state.attempt > 1 else None
    attempt = StartedAttempt(task.state.attempt, task.lease_expires_at, task.epoch, outputs, saved)
    return task, inputs, task.state.lease_token, attempt
