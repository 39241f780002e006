"""Step 1, events in: records and routes the events that an attempt sends, before it gets its answer."""

from __future__ import annotations

from tracelake.contracts.dispatcher_api import (
    EventIn,
    EventOut,
    EventsRequest,
    EventsResponse,
    TriggerRequest,
    TriggerResponse,
)
from tracelake.dispatcher.steps import commit_outputs
from tracelake.dispatcher.steps.context import StepContext, check_events
from tracelake.dispatcher.steps.count_events import CountedEvents, count_events, open_gates
from tracelake.dispatcher.steps.produced_events import Producer, resolve_events
from tracelake.domain.dag.model import SourceKind
from tracelake.domain.errors import Conflict, NotFound
from tracelake.domain.events import EventState
from tracelake.domain.task import TaskKind, check_may_report
from tracelake.store import jobs, tasks
from tracelake.store.db import Transaction
from tracelake.store.tasks import TaskRow


async def accept_events(ctx: StepContext, request: EventsRequest) -> EventsResponse:
    sender: TaskRow | None = None

    async def work(tx: Transaction) -> CountedEvents:
        nonlocal sender
        sender = task = (await tasks.lock(tx, [request.task_id])).get(request.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {request.task_id}")
        check_may_report(task.state, request.attempt, request.lease_token)
        await check_events(ctx.emissions, tx, task, len(request.events))
        definition = (await ctx.definitions.get(tx, [task.job_id]))[task.job_id]
        producer = Producer(
            definition.org_id,
            task.job_id,
            task.state.job_active,
            task.task_id,
            request.attempt,
            task.epoch,
            task.bulk,
        )
        produced = await resolve_events(tx, producer, definition, request.events)
        gates = await open_gates(
            tx,
            produced,
            own_jobs=[task.job_id] if task.state.kind is TaskKind.CURSOR else [],
            inputs=commit_outputs.used_versions(task),
        )
        # Events that were derived from invalidated inputs must not create tasks.
        if await commit_outputs.with_changed_inputs(tx, [task], gates.versions):
            raise Conflict(
                "InputChanged", f"an input of task {task.task_id} was invalidated or filled in meanwhile"
            )
        return await count_events(ctx, tx, produced, gates)

    with ctx.metrics.timed("events"):
        counted = await ctx.db.run(work, hot=True)
    assert sender is not None
    # After the commit: a transaction that was run again counts once.
    ctx.emissions.add_events(sender, len(request.events))
    _count(ctx, counted)
    return EventsResponse(
        [EventOut(kept.event_id, kept.state.value, kept.revision) for kept in counted.kept],
        len(counted.created),
        pause=sender.state.job_paused,
    )


async def trigger_source(ctx: StepContext, dag: str, job: str, request: TriggerRequest) -> TriggerResponse:
    """Record an event on output 0 of a manual source, as if one of its tasks had sent it. While the source is
    paused or held the event is kept."""

    async def work(tx: Transaction) -> CountedEvents:
        active = await jobs.active(tx, dag, job)
        if active.source_kind is not SourceKind.MANUAL:
            raise Conflict("NotManual", f"{dag}/{job} is not a manual source")
        definition = (await ctx.definitions.get(tx, [active.job_id]))[active.job_id]
        event = EventIn(
            dataset_uuid=definition.outputs[0].dataset_uuid,
            cursor=request.cursor,
            start=request.start,
            end=request.end,
        )
        bulk = request.priority == "bulk"
        producer = Producer(
            definition.org_id, active.job_id, active=True, bulk=bulk, held=active.keeps(bulk=bulk)
        )
        produced = await resolve_events(tx, producer, definition, [event])
        gates = await open_gates(tx, produced)
        return await count_events(ctx, tx, produced, gates)

    with ctx.metrics.timed("trigger"):
        counted = await ctx.db.run(work, hot=True)
    _count(ctx, counted)
    # A kept event is routed as soon as there is room.
    if any(kept.state is EventState.HELD for kept in counted.kept):
        ctx.queues.look_soon()
    return TriggerResponse(counted.kept[0].event_id, len(counted.created))


def _count(ctx: StepContext, counted: CountedEvents) -> None:
    for kept in counted.kept:
        ctx.metrics.events.labels(kept.state.value).inc()
    ctx.metrics.tasks_created.inc(len(counted.created))
    ctx.queues.note(created=len(counted.created))
