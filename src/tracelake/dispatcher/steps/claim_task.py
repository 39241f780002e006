"""Step 4, claim: Queued becomes Running, with a lease, an epoch and the payload.

Promises: one holder per attempt, however many ask; a repeat with the same ``claim_key`` gets the same
lease; a cap is never exceeded, because claims of capped jobs meet on the job's row before they count.
Several claims share one transaction; each is decided on its own.
"""

from __future__ import annotations

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
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.end_attempts import wake_next
from tracelake.dispatcher.steps.sink_task import sink_config
from tracelake.dispatcher.steps.task_token import issue_token
from tracelake.domain.task import ClaimGate, ClaimVerdict, TaskKind, TaskStatus, decide_claim
from tracelake.store import invalidations, jobs, operator_state, tasks
from tracelake.store.db import Row, Transaction
from tracelake.store.invalidations import Written
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
    """A lease, new or handed out again, before its token is signed."""

    org_id: UUID
    payload: TaskPayload
    lease_token: UUID
    lease_expires_at: datetime
    now: datetime


async def claim_tasks(ctx: StepContext, claims: Sequence[ClaimRequest]) -> list[ClaimResponse]:
    async def work(tx: Transaction) -> list[_Granted | ClaimVerdict]:
        return await _claim(ctx, tx, claims)

    with ctx.metrics.timed("claim"):
        decided = await ctx.db.run(work, hot=True)
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
    rows = await tasks.lock(tx, {claim.task_id for claim in claims})
    gates = await _gates(tx, list(rows.values()))
    queued = [row for row in rows.values() if row.state.status is TaskStatus.QUEUED]
    reads = await tasks.claim_inputs(tx, queued) if queued else {}
    gates = _with_inputs(gates, reads)
    verdicts = _decide(claims, rows, gates)
    superseded = [c.task_id for c, v in zip(claims, verdicts, strict=True) if v is ClaimVerdict.SUPERSEDED]
    await tasks.cancel(tx, superseded, "a later task covers the same scope")
    await _hand_on(tx, claims, rows, gates, verdicts)
    granted = [c for c, v in zip(claims, verdicts, strict=True) if v in _GRANTS]
    cards = await ctx.cards.get(tx, (rows[claim.task_id].job_id for claim in granted))
    started = await _start(ctx, tx, claims, rows, verdicts, reads)
    results: list[_Granted | ClaimVerdict] = []
    for claim, verdict in zip(claims, verdicts, strict=True):
        if verdict in _GRANTS:
            task, inputs, lease_token, attempt = started[claim.task_id]
            card = cards[task.job_id]
            payload = render_payload.render(
                ctx,
                task,
                card,
                inputs,
                attempt.outputs,
                attempt=attempt.attempt,
                epoch=attempt.epoch,
                state=attempt.state,
                written=await _written(tx, task),
                config=await sink_config(ctx, tx, card),
            )
            results.append(_Granted(card.org_id, payload, lease_token, attempt.lease_expires_at, task.now))
        else:
            results.append(verdict)
    return results


async def _gates(tx: Transaction, rows: Sequence[TaskRow]) -> dict[UUID, ClaimGate]:
    gated = [row for row in rows if row.gated]
    if not gated:
        return {}
    await tasks.lock_gates(tx, (row.job_id for row in gated))
    return await tasks.claim_gates(tx, gated)


async def _hand_on(
    tx: Transaction,
    claims: Sequence[ClaimRequest],
    rows: dict[UUID, TaskRow],
    gates: dict[UUID, ClaimGate],
    verdicts: Sequence[ClaimVerdict],
) -> None:
    """A refused claim has spent its wake-up. What found its job full waits for the next slot; what can't run
    for another reason leaves the slot, if that is what it was woken for, to the next in line."""
    refused = {claim.task_id: verdict for claim, verdict in zip(claims, verdicts, strict=True)}
    gated = [row for row in rows.values() if row.gated and row.state.status is TaskStatus.QUEUED]
    parked = [
        row
        for row in gated
        if refused[row.task_id] is ClaimVerdict.NOT_READY and gates[row.task_id].inputs_committed
    ]
    out = [
        row
        for row in gated
        if refused[row.task_id] is ClaimVerdict.SUPERSEDED or not gates[row.task_id].inputs_committed
    ]
    await tasks.park(tx, [row.task_id for row in parked])
    await wake_next(tx, out)


def _with_inputs(gates: dict[UUID, ClaimGate], reads: dict[UUID, list[Row]]) -> dict[UUID, ClaimGate]:
    """The gates, with what the tasks' inputs say: an invalidation may have taken a scope back meanwhile."""
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
    """One verdict per claim. What an earlier claim of the call took counts for the later ones."""
    taken: dict[UUID, int] = {}
    claimed: dict[UUID, ClaimRequest] = {}
    verdicts = []
    for claim in claims:
        row = rows.get(claim.task_id)
        if claim.task_id in claimed:
            first = claimed[claim.task_id]
            same = claim.claim_key is not None and claim == first
            verdicts.append(ClaimVerdict.SAME_LEASE if same else ClaimVerdict.ALREADY_RUNNING)
            continue
        if row is None:
            verdicts.append(ClaimVerdict.NOT_FOUND)
            continue
        gate = gates.get(claim.task_id, ClaimGate())
        gate = replace(gate, running=gate.running + taken.get(row.job_id, 0))
        verdict = decide_claim(
            row.state, gate, worker_id=claim.worker_id, claim_key=claim.claim_key, now=row.now
        )
        if verdict is ClaimVerdict.CLAIM:
            taken[row.job_id] = taken.get(row.job_id, 0) + 1
            claimed[claim.task_id] = claim
        verdicts.append(verdict)
    return verdicts


async def _written(tx: Transaction, task: TaskRow) -> dict[UUID, Written]:
    """Where a source stands with its outputs. Read after their revisions: who invalidates one in between makes the
    source do its work again, and never lets it pass over what was taken back."""
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
    """Begin the new attempts; leases that are handed out again come back as they were."""
    started: dict[UUID, _Started] = {}
    new: dict[UUID, ClaimRequest] = {}
    for claim, verdict in zip(claims, verdicts, strict=True):
        if verdict is ClaimVerdict.CLAIM:
            new[claim.task_id] = claim
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
    saved = await operator_state.saved(tx, task.task_id) if task.state.attempt > 1 else None
    attempt = StartedAttempt(task.state.attempt, task.lease_expires_at, task.epoch, outputs, saved)
    return task, inputs, task.state.lease_token, attempt
