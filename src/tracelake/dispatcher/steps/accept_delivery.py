"""Webhooks: a signed call of a source is judged, kept durably and routed; and the secrets that callers sign with.

A call is judged before anything is written, by the secrets that are accepted now. A source that doesn't exist is
judged too, by keys that nobody has, and only then refused, so both take the same time. An accepted delivery is
committed, its body with it, before the caller gets its answer; one that comes again, by the sender's id, changes
nothing, also when both come at once.

Deliveries per source are limited by an allowance that refills with time and is kept with the source, for all
replicas. Only authentic calls use it up: others can't keep a source from its deliveries. How many calls are read at
a time is bounded by the route.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

import structlog

from tracelake.contracts.sources import (
    MAX_INLINE_BODY,
    DeliveryAccepted,
    SecretRequest,
    WebhookSecret,
)
from tracelake.dispatcher.steps.context import HookLimits, StepContext
from tracelake.dispatcher.steps.source_requests import (
    AcceptedRequest,
    SourceRequest,
    accept_request,
    counted,
)
from tracelake.domain.dag.model import Signature, SourceKind, WebhookSettings
from tracelake.domain.errors import Conflict, NotFound, RateLimited, TracelakeError
from tracelake.domain.webhooks import judge_call, new_secret
from tracelake.objects.base import ObjectLocation, delivery_location
from tracelake.store import dags, jobs, sources
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.sources import DeliveryRow, SourceRow

log = structlog.get_logger(__name__)


async def accept_delivery(
    ctx: StepContext, dag: str, job: str, headers: Mapping[str, str], body: bytes
) -> DeliveryAccepted:
    hook = await ctx.db.run(lambda tx: sources.webhook(tx, dag, job), lock=DeployLock.NONE)
    signature = hook.settings.signature if hook is not None else Signature.STANDARD
    keys = hook.secrets if hook is not None else ()
    # Not read for a source that doesn't exist: one more query would show that it doesn't.
    now = hook.now.timestamp() if hook is not None else 0.0
    try:
        caller = judge_call(signature, headers, body, keys, now)
    except TracelakeError:
        ctx.metrics.source_requests.labels(SourceKind.WEBHOOK.value, "refused").inc()
        if hook is None:
            raise _unknown(dag, job) from None
        raise
    delivery_id = caller.delivery_id or str(ctx.entropy.uuid())
    sent = await _keep_body(ctx, delivery_id, headers.get("content-type"), body)

    async def work(tx: Transaction) -> DeliveryAccepted | AcceptedRequest | RateLimited:
        active = await jobs.find_active(tx, dag, job)
        if active is None or active.source_kind is not SourceKind.WEBHOOK:
            raise _unknown(dag, job)
        row = await sources.lock(tx, dag, job)
        # Under the source's lock: the same delivery twice at once is accepted once.
        known = await sources.number_of_delivery(tx, dag, job, delivery_id)
        if known is not None:
            return DeliveryAccepted(known, known=True)
        left = _allowance(ctx.hook_limits, row)
        if left < 1:
            # Or it wouldn't refill before the clock is where it was.
            if _set_back(row):
                await sources.take_allowance(tx, dag, job, left)
            return _beyond_rate(ctx.hook_limits, left)
        await sources.take_allowance(tx, dag, job, left - 1)
        number = row.last_number + 1
        request = SourceRequest(SourceKind.WEBHOOK, number, delivery=sent)
        return await accept_request(ctx, tx, active, request)

    with ctx.metrics.timed("delivery"):
        done = await ctx.db.run(work, hot=True)
    if isinstance(done, RateLimited):
        raise done
    if isinstance(done, DeliveryAccepted):
        ctx.metrics.source_requests.labels(SourceKind.WEBHOOK.value, "known").inc()
        return done
    counted(ctx, SourceKind.WEBHOOK, done)
    return DeliveryAccepted(done.number, kept=done.kept)


def _unknown(dag: str, job: str) -> NotFound:
    return NotFound("UnknownSource", f"there is no webhook {dag}/{job}")


def _allowance(limits: HookLimits, row: SourceRow) -> float:
    """What the source may accept now."""
    if row.allowance is None or row.allowed_at is None:
        return limits.burst
    # A clock that was set back refills nothing, and takes nothing either.
    passed = 0.0 if _set_back(row) else (row.now - row.allowed_at).total_seconds()
    return min(limits.burst, row.allowance + passed * limits.rate)


def _set_back(row: SourceRow) -> bool:
    return row.allowed_at is not None and row.allowed_at > row.now


def _beyond_rate(limits: HookLimits, left: float) -> RateLimited:
    return RateLimited(
        "RateLimited", "the source accepts no more deliveries for now", (1 - left) / limits.rate
    )


async def _keep_body(
    ctx: StepContext, delivery_id: str, content_type: str | None, body: bytes
) -> DeliveryRow:
    """A body that isn't small is stored before the row that names it; a crash in between leaves an object that
    nothing names."""
    # Postgres refuses control characters of some kinds, and people read it in tables.
    kind = content_type[:200] if content_type and content_type.isprintable() else None
    if len(body) <= MAX_INLINE_BODY:
        return DeliveryRow(delivery_id, kind, body, None, len(body))
    place = delivery_location(ctx.objects.root, ctx.entropy.uuid())
    await ctx.objects.put(place, body)
    return DeliveryRow(delivery_id, kind, None, place.uri, len(body))


async def read_body(ctx: StepContext, task_id: UUID) -> tuple[bytes, str | None]:
    """The body of the delivery that a task is for, and its content type."""
    found = await ctx.db.run(lambda tx: sources.requests_of(tx, [task_id]), lock=DeployLock.NONE)
    request = found.get(task_id)
    if request is None or request.delivery is None:
        raise NotFound("NoDelivery", f"task {task_id} is for no delivery")
    sent = request.delivery
    if sent.body is not None:
        return sent.body, sent.content_type
    place = ctx.objects.locate(sent.body_location or "")
    assert isinstance(place, ObjectLocation)
    return await ctx.objects.read(place, sent.body_bytes), sent.content_type


async def show_secret(
    ctx: StepContext, dag: str, job: str, request: SecretRequest, actor: str
) -> WebhookSecret:
    """The secret that nobody has seen yet, or a new one. Neither is shown again."""

    async def work(tx: Transaction) -> WebhookSecret:
        active = await jobs.active(tx, dag, job)
        if active.source_kind is not SourceKind.WEBHOOK:
            raise Conflict("NotWebhook", f"{dag}/{job} is not a webhook source")
        await sources.lock(tx, dag, job)
        hook = await sources.webhook(tx, dag, job)
        assert hook is not None
        until = None
        if request.rotate:
            until = await sources.expire_secret(tx, dag, job, request.overlap_seconds)
            secret = new_secret()
            await sources.add_secret(tx, dag, job, secret, shown=True)
        elif (unseen := await sources.show_secret(tx, dag, job)) is not None:
            secret = unseen
        else:
            raise Conflict(
                "SecretShown", f"the secret of {dag}/{job} was shown before; rotate it to get another one"
            )
        action = "rotate secret" if request.rotate else "show secret"
        await dags.audit(tx, ctx.org_id, actor, action, {"job": f"{dag}/{job}"})
        return _shown(dag, job, hook.settings, secret, until)

    shown = await ctx.db.run(work)
    log.info("webhook secret shown", job=f"{dag}/{job}", rotated=request.rotate, actor=actor)
    return shown


def _shown(
    dag: str, job: str, settings: WebhookSettings, secret: str, until: datetime | None
) -> WebhookSecret:
    return WebhookSecret(dag, job, f"/v1/hooks/{dag}/{job}", settings.signature.value, secret, until)
