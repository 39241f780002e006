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
from tracelake.dispatcher.steps import commit_outputs, source_requests
from tracelake.dispatcher.steps.context import StepContext, check_events
from tracelake.dispatcher.steps.count_events import CountedEvents, count_events, open_gates
from tracelake.dispatcher.steps.produced_events import Producer, parse_event, resolve_events
from tracelake.dispatcher.steps.source_requests import AcceptedRequest, SourceRequest, accept_request
from tracelake.domain.dag.model import SourceKind
from tracelake.domain.errors import Conflict, NotFound
from tracelake.domain.events import EventState
from tracelake.domain.task import TaskKind, check_may_report
from tracelake.store import jobs, sources, tasks
from tracelake.store.db import Transaction
from tracelake.store.jobs import ActiveJob
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
    """Record an event on output 0 of a manual source, as if one of its tasks had sent it; a source that runs code
    gets a task. While the source is paused or held, the trigger is kept."""

    async def work(tx: Transaction) -> CountedEvents | AcceptedRequest:
        active = await jobs.active(tx, dag, job)
        if active.source_kind is not SourceKind.MANUAL:
            raise Conflict("NotManual", f"{dag}/{job} is not a manual source")
        if active.runs_code:
            return await _trigger_code(ctx, tx, dag, job, active, request)
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
        done = await ctx.db.run(work, hot=True)
    if isinstance(done, CountedEvents):
        _count(ctx, done)
        kept = any(event.state is EventState.HELD for event in done.kept)
        source_requests.answered(ctx, SourceKind.MANUAL, "kept" if kept else "routed")
        answer = TriggerResponse(done.kept[0].event_id, len(done.created), kept)
    else:
        source_requests.counted(ctx, SourceKind.MANUAL, done)
        answer = TriggerResponse(None, done.tasks_created, done.kept)
    # A kept event, or its scopes for which there was no room, are routed as soon as there is room.
    if answer.kept or not answer.tasks_created:
        ctx.queues.look_soon()
    return answer


async def _trigger_code(
    ctx: StepContext, tx: Transaction, dag: str, job: str, active: ActiveJob, request: TriggerRequest
) -> AcceptedRequest:
    """Code needs no blocks to be triggered; if blocks are named, they must be a scope."""
    named = {name: getattr(request, name) for name in ("cursor", "start", "end")}
    scope = {name: value for name, value in named.items() if value is not None}
    if scope:
        parse_event(EventIn(dataset_uuid=active.job_id, **named))
    row = await sources.lock(tx, dag, job)
    bulk = request.priority == "bulk"
    return await accept_request(
        ctx, tx, active, SourceRequest(SourceKind.MANUAL, row.last_number + 1, scope, bulk=bulk)
    )


def _count(ctx: StepContext, counted: CountedEvents) -> None:
    for kept in counted.kept:
        ctx.metrics.events.labels(kept.state.value).inc()
    ctx.metrics.tasks_created.inc(len(counted.created))
    ctx.queues.note(created=len(counted.created))
