"""Deliveries: what a deploy makes of them, the calls of the process that sends, and what people see and do.

The process that sends holds a task's lease and nothing that must outlive it. A row becomes a message here, a try
is recorded here before it begins, and its end afterwards; so a process that dies between the two leaves a message
that may have arrived, and the next one sends it again under the same id.

The job behind a delivery is a source that never ends and has no output. Its definition isn't part of it: each
claim reads what is deployed then, and a process whose definition is no longer the deployed one begins again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import msgspec
import structlog
from msgspec import UNSET

from tracelake.contracts.deliveries import (
    MAX_SKIPPED,
    DeadMessage,
    DeliveryDetail,
    DeliveryLoad,
    DeliveryLoaded,
    DeliveryMessage,
    DeliveryPlan,
    DeliveryPlanned,
    DeliveryReport,
    DeliveryReported,
    DeliverySummary,
    MessagesDropped,
    MessagesReplayed,
    MessageSummary,
    SkippedMessage,
    WaitingProducer,
)
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import pause_job, resume_job
from tracelake.domain.dag.model import (
    Activation,
    DeliverySpec,
    EmailTarget,
    JobSettings,
    JobSpec,
    SlackTarget,
    SourceKind,
    UpdateStrategy,
    WebhookTarget,
)
from tracelake.domain.errors import Conflict, Forbidden, NotFound
from tracelake.domain.operators.catalog import DELIVERY
from tracelake.domain.runtimes import DELIVERY as DELIVERY_RUNTIME
from tracelake.domain.task import check_may_act
from tracelake.store import dags, deliveries, jobs, outbox, tasks
from tracelake.store.db import DeployLock, Row, Transaction
from tracelake.store.deliveries import LockedDelivery, delivery_job
from tracelake.store.jobs import JobDefinition, PauseCause

KEEP_DAYS = 30
"""How long a message that has ended is kept; a row whose message is gone can't be retracted any more. Dead letters
are kept until they are replayed or dropped."""
COLLECT_BATCH = 1000
# Short times: while no process sends, people wait.
_SETTINGS = JobSettings(heartbeat_timeout_seconds=30, retry_base_seconds=1, retry_max_seconds=60)
_CAUSES = (PauseCause.PERSON, PauseCause.RECEIVER_GONE)
DeliveryCall = DeliveryLoad | DeliveryPlan | DeliveryReport
T = TypeVar("T")

log = structlog.get_logger(__name__)


async def deploy_deliveries(
    ctx: StepContext,
    tx: Transaction,
    dag: str,
    specs: Sequence[DeliverySpec],
    retire: Callable[[list[tuple[str, str]]], Awaitable[None]],
) -> None:
    """``retire`` ends the active jobs of these names. Runs behind the datasets of the deploy."""
    wanted: dict[str, tuple[DeliverySpec, UUID, int]] = {}
    for spec in specs:
        found = await deliveries.dataset(tx, ctx.org_id, spec.dataset)
        # The plan has looked under the same lock.
        assert found is not None
        wanted[spec.name] = (spec, *found)
    for row in await deliveries.active_of_dag(tx, dag):
        kept = wanted.get(row["name"])
        if kept is None or kept[1] != row["dataset_uuid"]:
            await retire([(dag, delivery_job(row["name"]))])
            await deliveries.retire(tx, row["delivery_id"])
    for spec, dataset_uuid, position in wanted.values():
        await _install(ctx, tx, dag, spec, dataset_uuid, position)


async def _install(
    ctx: StepContext, tx: Transaction, dag: str, spec: DeliverySpec, dataset_uuid: UUID, position: int
) -> None:
    job = _job(spec)
    known = await deliveries.find(tx, dag, spec.name, dataset_uuid)
    if known is None:
        job_id = ctx.entropy.uuid()
        await dags.add_job(tx, job_id, ctx.org_id, dag, job, f"delivery {dataset_uuid}")
        await deliveries.add(tx, ctx.entropy.uuid(), ctx.org_id, dag, spec, dataset_uuid, job_id, position)
    else:
        job_id = known["job_id"]
        await dags.tune_job(tx, job_id, job)
        await deliveries.change(tx, known["delivery_id"], spec, position)
    created = await tasks.create_source_task(tx, ctx.entropy.uuid(), job_id, {"kind": "deploy"})
    await outbox.wake(tx, created)


def _job(spec: DeliverySpec) -> JobSpec:
    return JobSpec(
        name=delivery_job(spec.name),
        activation=Activation.SOURCE,
        runtime=DELIVERY_RUNTIME,
        operator=DELIVERY,
        source_kind=SourceKind.ALWAYS_ON,
        update_strategy=UpdateStrategy.REPLACE,
        settings=_SETTINGS,
    )


async def delivery_config(tx: Transaction, definition: JobDefinition) -> dict[str, Any] | None:
    """The configuration of a delivery's task as it is deployed now; None for every other job."""
    if definition.operator != DELIVERY:
        return None
    config = await deliveries.config_of_job(tx, definition.job_id)
    assert config is not None
    built: dict[str, Any] = msgspec.to_builtins(config)
    return built


async def _fenced(
    ctx: StepContext, call: DeliveryCall, work: Callable[[Transaction, LockedDelivery], Awaitable[T]]
) -> T:
    async def fenced(tx: Transaction) -> T:
        task = await tasks.share(tx, call.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {call.task_id}")
        check_may_act(task.state, call.attempt, call.lease_token)
        delivery = await deliveries.lock_of_job(tx, task.job_id)
        # A worker token admits any worker; only the task of this delivery may speak for it.
        if delivery is None:
            raise Forbidden("NotYourDelivery", f"task {task.task_id} delivers nothing")
        return await work(tx, delivery)

    return await ctx.db.run(fenced, lock=DeployLock.NONE)


async def load_delivery(ctx: StepContext, call: DeliveryLoad) -> DeliveryLoaded:
    """What the process lacks: its position, messages, the last final blocks."""

    async def work(tx: Transaction, delivery: LockedDelivery) -> DeliveryLoaded:
        if call.begin:
            await deliveries.begin_attempt(tx, delivery.delivery_id)
        if call.trouble is not None:
            await deliveries.count_outcomes(tx, delivery.delivery_id, 0, 0, call.trouble)
        elif call.ready and delivery.is_failing:
            await deliveries.note_ready(tx, delivery.delivery_id)
        found = await deliveries.take_new(
            tx, delivery.delivery_id, call.limit, None if call.holds is UNSET else call.holds
        )
        finalized, heads = await deliveries.finality(tx, delivery.delivery_id)
        waits = await deliveries.waits(tx, delivery.delivery_id)
        return DeliveryLoaded(
            delivery.position, delivery.definition, found, finalized, heads, waits, delivery.resumed_at
        )

    return await _fenced(ctx, call, work)


async def plan_delivery(ctx: StepContext, call: DeliveryPlan) -> DeliveryPlanned:
    """Make messages of rows. ``Conflict`` when these positions were planned before: a lost answer, mostly."""

    async def work(tx: Transaction, delivery: LockedDelivery) -> DeliveryPlanned:
        if delivery.position != call.after:
            raise Conflict("PositionMoved", f"the delivery is at {delivery.position}, not at {call.after}")
        waits = {*await deliveries.waits(tx, delivery.delivery_id)}
        if call.waited is not UNSET and {*call.waited} != waits:
            raise Conflict("PositionMoved", "rows of the producers that wait were planned before")
        dropped: list[int] = []
        # Retractions first: a record has one row in a portion, so the order among them doesn't matter.
        messages: list[DeliveryMessage] = []
        if call.gone:
            dropped, messages = await deliveries.retract(tx, delivery.delivery_id, call.gone)
        if call.rows:
            messages += await deliveries.add_rows(tx, delivery.delivery_id, call.rows)
            if refused := [row.refused for row in call.rows if row.refused is not None]:
                await deliveries.note_error(tx, delivery.delivery_id, refused[-1])
        await deliveries.move_position(tx, delivery.delivery_id, call.upto)
        if call.waits is not UNSET:
            await deliveries.set_waits(tx, delivery.delivery_id, call.waits)
        return DeliveryPlanned(sorted(messages, key=lambda each: each.message_id), dropped)

    return await _fenced(ctx, call, work)


async def report_delivery(ctx: StepContext, call: DeliveryReport) -> DeliveryReported:
    """Record how tries ended, then those that begin."""

    async def work(tx: Transaction, delivery: LockedDelivery) -> tuple[DeliveryReported, bool]:
        dropped, refuses = await _record(tx, delivery, call) if call.outcomes else ([], False)
        # Read under the delivery's lock, which a person's pause waits for: afterwards no try begins.
        paused = bool(call.starting) and await jobs.is_paused(tx, delivery.job_id)
        started: list[int] = []
        if call.starting and not paused:
            started = await deliveries.start_tries(tx, delivery.delivery_id, call.starting)
        return DeliveryReported(started, dropped, paused), refuses

    response, refuses = await _fenced(ctx, call, work)
    if refuses:
        await _pause_gone(ctx, call.task_id)
    return response


async def _record(tx: Transaction, delivery: LockedDelivery, call: DeliveryReport) -> tuple[list[int], bool]:
    """The messages that were dropped, and whether the receiver wants no more."""
    ended = await deliveries.record_outcomes(tx, delivery.delivery_id, call.outcomes)
    sent = sum(row["result"] == "sent" and row["kind"] == "row" for row in ended)
    retracted = sum(row["result"] == "sent" and row["kind"] == "retracted" for row in ended)
    failed = [row for row in ended if row["result"] != "sent"]
    dropped: list[int] = []
    if failed:
        dropped = await deliveries.drop_overtaken(
            tx, delivery.delivery_id, [row["message_id"] for row in failed]
        )
        if dead := [row["message_id"] for row in failed if row["result"] == "dead"]:
            await deliveries.supersede_dead(tx, delivery.delivery_id, dead)
    error = failed[-1]["error"] or "it failed" if failed else None
    await deliveries.count_outcomes(tx, delivery.delivery_id, sent, retracted, error)
    return dropped, any(row["refuses"] for row in ended)


async def _pause_gone(ctx: StepContext, task_id: UUID) -> None:
    """The receiver wants no more: nothing is sent, or lost, until a person resumes."""

    async def work(tx: Transaction) -> tuple[str, str] | None:
        task = await tasks.share(tx, task_id)
        assert task is not None
        definition = (await ctx.definitions.get(tx, [task.job_id]))[task.job_id]
        return (definition.dag_name, definition.name) if task.state.job_active else None

    job = await ctx.db.run(work, lock=DeployLock.NONE)
    if job is not None:
        await pause_job(ctx, *job, "system", PauseCause.RECEIVER_GONE)


async def view_deliveries(ctx: StepContext) -> list[DeliverySummary]:
    rows = await ctx.db.run(lambda tx: deliveries.overview(tx, ctx.org_id), lock=DeployLock.NONE)
    return [DeliverySummary(**_fields(row)) for row in rows]


async def view_delivery(
    ctx: StepContext, dag: str, name: str, state: str | None, limit: int
) -> DeliveryDetail:
    async def work(tx: Transaction) -> tuple[Row, list[Row]]:
        row = await _find(ctx, tx, dag, name)
        return row, await deliveries.messages(tx, row["delivery_id"], state, limit)

    row, found = await ctx.db.run(work, lock=DeployLock.NONE)
    spec = msgspec.convert(row["spec"], DeliverySpec)
    return DeliveryDetail(
        **_fields(row),
        template=spec.template,
        key=spec.key,
        messages=[
            MessageSummary(
                each["message_id"],
                each["record_id"],
                each["revision"],
                each["kind"],
                each["state"],
                each["tries"],
                each["last_status"],
                each["last_error"],
                each["created_at"],
                each["next_try_at"] if each["state"] == "waiting" else None,
                each["finished_at"],
            )
            for each in found
        ],
    )


async def replay_messages(
    ctx: StepContext, dag: str, name: str, ids: Sequence[int] | None, actor: str
) -> MessagesReplayed:
    """Send dead letters again, these or all, but none that would replace something newer at the receiver."""

    async def work(tx: Transaction) -> MessagesReplayed:
        row = await _find(ctx, tx, dag, name)
        if not row["active"]:
            raise Conflict(
                "NotDeployed", f"no DAG has the delivery {dag}/{name} now, so nothing would send it"
            )
        await _named(tx, row, ids)
        count, kept = await deliveries.replay(tx, row["delivery_id"], ids, MAX_SKIPPED)
        if count:
            subject = {"delivery": f"{dag}/{name}", "messages": count}
            await dags.audit(tx, ctx.org_id, actor, "replay delivery", subject)
        skipped = [SkippedMessage(each["message_id"], each["state"], each["last_error"]) for each in kept]
        return MessagesReplayed(count, skipped)

    return await ctx.db.run(work, lock=DeployLock.NONE)


async def drop_messages(
    ctx: StepContext, dag: str, name: str, ids: Sequence[int] | None, actor: str
) -> MessagesDropped:
    """Give up dead letters for good, these or all; also those of a delivery that was removed."""

    async def work(tx: Transaction) -> MessagesDropped:
        row = await _find(ctx, tx, dag, name)
        named = await _named(tx, row, ids)
        count = await deliveries.drop_dead(tx, row["delivery_id"], ids)
        if count:
            subject = {"delivery": f"{dag}/{name}", "messages": count}
            await dags.audit(tx, ctx.org_id, actor, "drop delivery messages", subject)
        return MessagesDropped(count, _not_dead(named))

    return await ctx.db.run(work, lock=DeployLock.NONE)


async def _named(tx: Transaction, row: Row, ids: Sequence[int] | None) -> list[Row]:
    """The messages that a request names; raises for one that the delivery doesn't have."""
    if ids is None:
        return []
    found = await deliveries.find_messages(tx, row["delivery_id"], ids)
    if unknown := sorted(set(ids) - {each["message_id"] for each in found}):
        numbers = ", ".join(map(str, unknown[:10]))
        raise NotFound("UnknownMessage", f"{row['dag_name']}/{row['name']} has no message {numbers}")
    return sorted(found, key=lambda each: each["message_id"])


def _not_dead(named: Sequence[Row]) -> list[int]:
    return [each["message_id"] for each in named if not each["is_dead"]]


async def pause_delivery(ctx: StepContext, dag: str, name: str, actor: str) -> list[str]:
    """No try begins once this is answered; those that are under way end."""
    delivery_id = await _known(ctx, dag, name)
    await pause_job(ctx, dag, delivery_job(name), actor)
    # Reports that haven't seen the pause hold this lock until they are committed.
    await ctx.db.run(lambda tx: deliveries.lock(tx, delivery_id), lock=DeployLock.NONE)
    return await _causes(ctx, dag, name)


async def resume_delivery(ctx: StepContext, dag: str, name: str, actor: str) -> list[str]:
    """Also after the receiver was gone: the message that it refused is tried again. Refusals that are still on
    their way don't pause it again."""
    delivery_id = await _known(ctx, dag, name)
    await ctx.db.run(lambda tx: deliveries.note_resume(tx, delivery_id), lock=DeployLock.NONE)
    for cause in _CAUSES:
        await resume_job(ctx, dag, delivery_job(name), actor, cause)
    return await _causes(ctx, dag, name)


async def collect_messages(ctx: StepContext) -> int:
    return await ctx.db.run(lambda tx: deliveries.collect(tx, KEEP_DAYS, COLLECT_BATCH), lock=DeployLock.NONE)


async def _known(ctx: StepContext, dag: str, name: str) -> UUID:
    row = await ctx.db.run(lambda tx: _find(ctx, tx, dag, name), lock=DeployLock.NONE)
    if not row["active"]:
        raise Conflict("NotDeployed", f"no DAG has the delivery {dag}/{name} now")
    delivery_id: UUID = row["delivery_id"]
    return delivery_id


async def _causes(ctx: StepContext, dag: str, name: str) -> list[str]:
    row = await ctx.db.run(lambda tx: _find(ctx, tx, dag, name), lock=DeployLock.NONE)
    return list(row["paused_by"])


async def _find(ctx: StepContext, tx: Transaction, dag: str, name: str) -> Row:
    rows = await deliveries.overview(tx, ctx.org_id, dag, name)
    if not rows:
        raise NotFound("UnknownDelivery", f"there is no delivery {dag}/{name}")
    # The active one is first.
    return rows[0]


def _fields(row: Row) -> dict[str, Any]:
    spec = msgspec.convert(row["spec"], DeliverySpec)
    return {
        "dag_name": row["dag_name"],
        "name": row["name"],
        "dataset": row["dataset"],
        "to": _target(spec),
        "when": spec.when.value,
        "where": spec.where.text if spec.where is not None else None,
        "status": _status(row),
        "paused_by": list(row["paused_by"]),
        "waiting": row["waiting"],
        "sent": row["sent"],
        "retracted": row["retracted"],
        "dead": row["dead"],
        "behind": row["behind"] if row["active"] else 0,
        "waits_for": msgspec.convert(row["waits_for"], list[WaitingProducer], strict=False),
        "oldest_seconds": row["oldest_seconds"],
        "failing_since": row["failing_since"],
        "last_error": row["last_error"],
        "last_error_at": row["last_error_at"],
        "last_sent_at": row["last_sent_at"],
        "task_id": row["task_id"],
        "task_status": row["task_status"],
        "newest_dead": DeadMessage(row["newest_dead"], row["dead_error"], row["dead_at"])
        if row["dead"]
        else None,
        "replayable": row["replayable"],
        "too_large": list(row["too_large"]),
    }


def _status(row: Row) -> str:
    if not row["active"]:
        return "removed"
    if PauseCause.RECEIVER_GONE in row["paused_by"]:
        return "gone"
    if row["paused_by"]:
        return "paused"
    if row["failing_since"] is not None:
        return "failing"
    return "sending" if row["task_status"] == "Running" else "waiting"


def _target(spec: DeliverySpec) -> str:
    match spec.to:
        case WebhookTarget(url_secret):
            return f"webhook {url_secret}"
        case SlackTarget(url_secret):
            return f"slack {url_secret}"
        case EmailTarget(recipients=recipients):
            return f"email {', '.join(recipients)}"
