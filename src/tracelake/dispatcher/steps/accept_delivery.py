"""Webhooks: a signed call of a source is judged, kept durably and routed; and the secrets that callers sign with.

A call is judged before anything is written, by the secrets that are accepted now. A source that doesn't exist is
judged too, by keys that nobody has, and only then refused, so both take the same time. An accepted delivery is
committed, its body with it, before the caller gets its answer; one that comes again, by the sender's id, changes
nothing, also when both come at once.

A body that isn't small is an object, stored before the row that names it, and only for a call that would be
accepted as things are. Its location is recorded first, so an object that no row comes to name, because the call is
refused after all or the process dies, is removed: at once, or by ``collect_bodies``.

Deliveries per source are limited by an allowance that refills with time and is kept with the source, for all
replicas. Only authentic calls use it up: others can't keep a source from its deliveries. How many bodies are waited
for at a time is bounded by the route.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    answered,
    counted,
)
from tracelake.domain.dag.model import Signature, SourceKind, WebhookSettings
from tracelake.domain.errors import Conflict, Forbidden, NotFound, RateLimited, TracelakeError, Unavailable
from tracelake.domain.webhooks import MAX_SECRETS, judge_call, new_secret
from tracelake.objects.base import ObjectLocation, delivery_location
from tracelake.store import dags, jobs, sources
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.jobs import ActiveJob
from tracelake.store.sources import DeliveryRow, SourceRow

BODY_SECONDS = 3600.0
"""Far more than a call may take: a body that nothing names by then was left over."""
COLLECT_BATCH = 100
Decided = AcceptedRequest | DeliveryAccepted | RateLimited

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
        answered(ctx, SourceKind.WEBHOOK, "refused")
        if hook is None:
            raise _unknown(dag, job) from None
        raise
    delivery_id = caller.delivery_id or str(ctx.entropy.uuid())
    with ctx.metrics.timed("delivery"):
        done = await _deliver(ctx, dag, job, delivery_id, headers.get("content-type"), body)
    if isinstance(done, RateLimited):
        answered(ctx, SourceKind.WEBHOOK, "limited")
        raise done
    if isinstance(done, DeliveryAccepted):
        answered(ctx, SourceKind.WEBHOOK, "known")
        return done
    counted(ctx, SourceKind.WEBHOOK, done)
    return DeliveryAccepted(done.number, kept=done.kept)


async def _deliver(
    ctx: StepContext, dag: str, job: str, delivery_id: str, content_type: str | None, body: bytes
) -> Decided:
    # Postgres refuses control characters of some kinds, and people read it in tables.
    kind = content_type[:200] if content_type and content_type.isprintable() else None
    if len(body) <= MAX_INLINE_BODY:
        sent = DeliveryRow(delivery_id, kind, body, None, len(body))
        return await ctx.db.run(lambda tx: _accept(ctx, tx, dag, job, sent), hot=True)
    place = delivery_location(ctx.objects.root, ctx.entropy.uuid())
    sent = DeliveryRow(delivery_id, kind, None, place.uri, len(body))
    refusal = await ctx.db.run(lambda tx: _begin_body(ctx, tx, dag, job, delivery_id, place), hot=True)
    if refusal is not None:
        return refusal
    await ctx.objects.put(place, body)
    try:
        done = await ctx.db.run(lambda tx: _accept(ctx, tx, dag, job, sent), hot=True)
    except NotFound:
        await _drop_body(ctx, place)
        raise
    if not isinstance(done, AcceptedRequest):
        await _drop_body(ctx, place)
    return done


async def _begin_body(
    ctx: StepContext, tx: Transaction, dag: str, job: str, delivery_id: str, place: ObjectLocation
) -> DeliveryAccepted | RateLimited | None:
    """Record a body that is to be stored; not for a call that wouldn't be accepted."""
    found = await _admit(ctx, tx, dag, job, delivery_id)
    if not isinstance(found, _Admitted):
        return found
    await sources.begin_body(tx, place.uri)
    return None


async def _accept(ctx: StepContext, tx: Transaction, dag: str, job: str, sent: DeliveryRow) -> Decided:
    found = await _admit(ctx, tx, dag, job, sent.delivery_id)
    if not isinstance(found, _Admitted):
        return found
    if sent.body_location is not None and not await sources.name_body(tx, sent.body_location):
        raise Unavailable("DeliveryTooLate", "the delivery's body took too long to store; send it again")
    await sources.take_allowance(tx, dag, job, found.allowance - 1)
    request = SourceRequest(SourceKind.WEBHOOK, found.row.last_number + 1, delivery=sent)
    return await accept_request(ctx, tx, found.job, request)


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A delivery that may be accepted: its source, locked, and what that may accept now."""

    job: ActiveJob
    row: SourceRow
    allowance: float


async def _admit(
    ctx: StepContext, tx: Transaction, dag: str, job: str, delivery_id: str
) -> _Admitted | DeliveryAccepted | RateLimited:
    active = await jobs.find_active(tx, dag, job)
    if active is None or active.source_kind is not SourceKind.WEBHOOK:
        raise _unknown(dag, job)
    row = await sources.lock(tx, dag, job)
    # Under the source's lock: the same delivery twice at once is accepted once.
    known = await sources.number_of_delivery(tx, dag, job, delivery_id)
    if known is not None:
        return DeliveryAccepted(known, known=True)
    left = _allowance(ctx.hook_limits, row)
    if left >= 1:
        return _Admitted(active, row, left)
    # Or it wouldn't refill before the clock is where it was.
    if _set_back(row):
        await sources.take_allowance(tx, dag, job, left)
    return _beyond_rate(ctx.hook_limits, left)


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


async def _drop_body(ctx: StepContext, location: ObjectLocation) -> None:
    if await ctx.db.run(lambda tx: sources.drop_body(tx, location.uri), lock=DeployLock.NONE):
        await _remove_bodies(ctx, [location.uri])


async def collect_bodies(ctx: StepContext) -> int:
    """Remove what calls that were broken off have stored; returns how many bodies."""
    removed = 0
    while True:
        late = await ctx.db.run(
            lambda tx: sources.drop_late_bodies(tx, BODY_SECONDS, COLLECT_BATCH), lock=DeployLock.NONE
        )
        await _remove_bodies(ctx, late)
        removed += len(late)
        if len(late) < COLLECT_BATCH:
            return removed


async def _remove_bodies(ctx: StepContext, locations: Sequence[str]) -> None:
    """Bodies that were dropped. Their rows go last: a removal that is broken off is done again."""
    for location in locations:
        # Outside of the root once the store was moved: there is nothing of it here.
        with suppress(Forbidden):
            await ctx.objects.delete_body(ObjectLocation.parse(location))
    if locations:
        await ctx.db.run(lambda tx: sources.forget_bodies(tx, locations), lock=DeployLock.NONE)


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
            before = await sources.expire_secrets(tx, dag, job, request.overlap_seconds)
            if len(before) >= MAX_SECRETS:
                raise Conflict(
                    "TooManySecrets",
                    f"{dag}/{job} has {len(before)} secrets that callers may still use, the most beside a new one "
                    f"being {MAX_SECRETS - 1}: wait until {before[0]:%Y-%m-%d %H:%M:%S}Z, or end all of them with "
                    "an overlap of 0 seconds",
                )
            until = before[-1] if before else None
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
