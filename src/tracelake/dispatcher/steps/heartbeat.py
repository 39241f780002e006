"""Heartbeat: a longer lease, and word of what the attempt should do.

Heartbeats commit without waiting for the disk: one lost in a crash is made up for by the next, and the
reaper waits a whole lease after an outage before it believes that anybody is dead.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tracelake.contracts.dispatcher_api import HeartbeatRequest, HeartbeatResponse
from tracelake.contracts.token_claims import TokenClaims
from tracelake.dispatcher.steps import render_payload
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.task_token import issue_token
from tracelake.domain.errors import NotFound
from tracelake.domain.task import Fence, HeartbeatVerdict, decide_heartbeat
from tracelake.store import jobs, tasks
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.tasks import TaskRow
from tracelake.tokens.capability import lifetime_seconds, renewal_due


async def heartbeat(
    ctx: StepContext, request: HeartbeatRequest, token: TokenClaims | None = None
) -> HeartbeatResponse:
    """``token`` is the capability token that the caller holds; a fresh one comes when it nears its end."""
    fence = Fence(request.task_id, request.attempt, request.lease_token)

    async def work(tx: Transaction) -> HeartbeatResponse:
        task = (await tasks.lock(tx, [fence.task_id])).get(fence.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {fence.task_id}")
        if decide_heartbeat(task.state, fence) is HeartbeatVerdict.CANCEL:
            return HeartbeatResponse(task.lease_expires_at, cancel=True, pause=task.state.job_paused)
        if request.progress is not None:
            await tasks.report_progress(tx, task.task_id, fence.attempt, request.progress)
        leases = await tasks.extend_leases(tx, [(task.task_id, task.heartbeat_timeout_seconds)])
        fresh = await _fresh_token(ctx, tx, task, token)
        return HeartbeatResponse(leases[task.task_id], False, task.state.job_paused, fresh)

    with ctx.metrics.timed("heartbeat"):
        return await ctx.db.run(work, lock=DeployLock.NONE, durable=False)


async def _fresh_token(
    ctx: StepContext, tx: Transaction, task: TaskRow, token: TokenClaims | None
) -> str | None:
    """A wrapper doesn't show the token here; the first one's age is the attempt's, and once that nears its
    end each heartbeat brings a fresh one."""
    if token is not None:
        expires_at = datetime.fromtimestamp(token.exp, UTC)
    else:
        began = await tasks.claimed_at(tx, task.task_id, task.state.attempt)
        expires_at = began + timedelta(seconds=lifetime_seconds(task.timeout_seconds))
    if not renewal_due(expires_at, task.timeout_seconds, task.now):
        return None
    cards = await ctx.cards.get(tx, [task.job_id])
    payload = render_payload.render(
        ctx,
        task,
        cards[task.job_id],
        render_payload.from_json(task.inputs or []),
        await jobs.output_state(tx, cards),
        attempt=task.state.attempt,
        epoch=task.epoch,
    )
    return await issue_token(ctx, cards[task.job_id].org_id, payload, task.now)
