"""Requests of sources: a tick, a delivery or a trigger is accepted, and becomes one event or one task.

A source without code has an event on output 0, a source with code a task whose payload says what it is for. While
the source's job is paused or held, requests are kept: as events that don't count yet, which ``apply_backpressure``
counts when the job is released, or, for code, as rows that become tasks then, as far as the job's own queue has
room. Both go in the order in which they were accepted, each once, and one that comes while others wait, waits
behind them. Normal ones pass bulk ones that can't go.

A request belongs to its source and not to a generation of the job. A deploy that replaces the job shelves tasks
that haven't begun or don't end well; their requests wait again, and the new generation runs them. It also takes
over the events that the old one has kept.

Locks: the source's row first, then gates as every step takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tracelake.contracts.dispatcher_api import EventIn, InvalidateRange
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.count_events import CountedEvents, count_events, open_gates
from tracelake.dispatcher.steps.produced_events import ProducedEvent, Producer, resolve_events
from tracelake.domain.dag.model import SourceKind
from tracelake.store import datasets, jobs, outbox, sources
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.jobs import ActiveJob, JobDefinition
from tracelake.store.sources import DeliveryRow, WaitingRequest

ROUTED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """``number`` is the tick, or comes next; ``scope`` are the blocks that a trigger names, and ``bulk`` one of a
    backfill."""

    kind: SourceKind
    number: int
    scope: Mapping[str, int] = field(default_factory=dict)
    delivery: DeliveryRow | None = None
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """``counted`` is the event or the task that it became. While it is ``kept``, its event doesn't count yet, and
    there is no task."""

    number: int
    kept: bool
    counted: CountedEvents = field(default_factory=CountedEvents)

    @property
    def event_id(self) -> int | None:
        # An invalidation comes before it.
        return self.counted.kept[-1].event_id if self.counted.kept else None

    @property
    def tasks_created(self) -> int:
        return len(self.counted.created)


async def accept_request(
    ctx: StepContext, tx: Transaction, job: ActiveJob, request: SourceRequest
) -> AcceptedRequest:
    """Record a request whose source's row is locked, and route it unless the source is held."""
    definition = (await ctx.definitions.get(tx, [job.job_id]))[job.job_id]
    dag, name = definition.dag_name, definition.name
    is_tick = request.kind is SourceKind.CRON
    await sources.advance(
        tx,
        dag,
        name,
        tick=request.number if is_tick else None,
        number=None if is_tick else request.number,
    )
    if definition.runs_code:
        return await _accept_for_code(ctx, tx, definition, request)
    kept = job.keeps(bulk=request.bulk)
    produced = await _produced(tx, definition, [request], held=kept)
    if is_tick:
        produced = [*await _undone(tx, definition, request.number), *produced]
    done = await count_events(ctx, tx, produced, await open_gates(tx, produced))
    # An event is all there is to a trigger. Of ticks and deliveries more is known, so that each is accepted once.
    if request.kind is not SourceKind.MANUAL:
        await _add(tx, definition, request, routed=True)
    return AcceptedRequest(request.number, kept, done)


async def _accept_for_code(
    ctx: StepContext, tx: Transaction, definition: JobDefinition, request: SourceRequest
) -> AcceptedRequest:
    await open_gates(tx, [], own_jobs=[definition.job_id])
    gate = await sources.request_gate(tx, definition.job_id)
    kept = gate.keeps(bulk=request.bulk)
    request_id = await _add(tx, definition, request, routed=not kept)
    if kept:
        return AcceptedRequest(request.number, kept=True)
    created = await _create_tasks(ctx, tx, definition, [(request_id, request)])
    return AcceptedRequest(request.number, kept=False, counted=created)


async def _add(tx: Transaction, definition: JobDefinition, request: SourceRequest, *, routed: bool) -> int:
    return await sources.add_request(
        tx,
        definition.org_id,
        definition.dag_name,
        definition.name,
        request.kind,
        request.number,
        request.scope,
        request.delivery,
        bulk=request.bulk,
        routed=routed,
    )


def answered(ctx: StepContext, kind: SourceKind, answer: str) -> None:
    ctx.metrics.source_requests.labels(kind.value, answer).inc()


def counted(ctx: StepContext, kind: SourceKind, accepted: AcceptedRequest) -> None:
    """Count a request, after its commit."""
    answered(ctx, kind, "kept" if accepted.kept else "routed")
    _count(ctx, accepted.counted)
    # A kept event is routed as soon as there is room, and new tasks may fill a queue.
    ctx.queues.look_soon()


def _count(ctx: StepContext, routed: CountedEvents) -> None:
    for kept in routed.kept:
        ctx.metrics.events.labels(kept.state.value).inc()
    ctx.metrics.tasks_created.inc(len(routed.created))


async def route_waiting(ctx: StepContext) -> int:
    """Route what released sources have kept; returns how many requests."""
    routed = 0
    for dag, job in await ctx.db.run(sources.waiting_sources, lock=DeployLock.NONE):
        while more := await _route_some(ctx, dag, job):
            routed += more
    return routed


async def _route_some(ctx: StepContext, dag: str, name: str) -> int:
    """The oldest requests of one source; 0 when none waits, none may go, or when it is held again."""

    async def work(tx: Transaction) -> tuple[int, CountedEvents]:
        none = 0, CountedEvents()
        job = await jobs.find_active(tx, dag, name)
        if job is None or job.source_kind in (None, SourceKind.ALWAYS_ON):
            return none
        await sources.lock(tx, dag, name)
        definition = (await ctx.definitions.get(tx, [job.job_id]))[job.job_id]
        if definition.runs_code:
            waiting, done = await _route_to_code(ctx, tx, definition)
        else:
            waiting, done = await _route_events(ctx, tx, definition, bulk_held=job.bulk_held)
        await sources.mark_routed(tx, [each.request_id for each in waiting])
        return len(waiting), done

    routed, done = await ctx.db.run(work)
    _count(ctx, done)
    return routed


async def _route_to_code(
    ctx: StepContext, tx: Transaction, definition: JobDefinition
) -> tuple[list[WaitingRequest], CountedEvents]:
    await open_gates(tx, [], own_jobs=[definition.job_id])
    gate = await sources.request_gate(tx, definition.job_id)
    found = await sources.waiting_requests(
        tx, definition.dag_name, definition.name, ROUTED_AT_ONCE, with_bulk=gate.has_room(bulk=True)
    )
    waiting = gate.routable(found)
    return waiting, await _create_tasks(ctx, tx, definition, [(each.request_id, each) for each in waiting])


async def _route_events(
    ctx: StepContext, tx: Transaction, definition: JobDefinition, *, bulk_held: bool
) -> tuple[list[WaitingRequest], CountedEvents]:
    """Requests that waited for code, of a source that has none any more."""
    waiting = await sources.waiting_requests(
        tx, definition.dag_name, definition.name, ROUTED_AT_ONCE, with_bulk=not bulk_held
    )
    produced = await _produced(tx, definition, waiting)
    gates = await open_gates(tx, produced, own_jobs=[definition.job_id])
    # Read again under the job's lock: it may have been paused since.
    if not waiting or await jobs.is_paused(tx, definition.job_id):
        return [], CountedEvents()
    return waiting, await count_events(ctx, tx, produced, gates)


async def _produced(
    tx: Transaction,
    definition: JobDefinition,
    requests: Sequence[SourceRequest | WaitingRequest],
    *,
    held: bool = False,
) -> list[ProducedEvent]:
    output = definition.outputs[0]
    produced: list[ProducedEvent] = []
    # One producer's events are bulk or not, all of them; those next to each other that are alike keep their order.
    for bulk, alike in groupby(requests, key=lambda request: request.bulk):
        producer = Producer(definition.org_id, definition.job_id, active=True, bulk=bulk, held=held)
        events = [EventIn(dataset_uuid=output.dataset_uuid, **_scope(request)) for request in alike]
        produced += await resolve_events(tx, producer, definition, events)
    return produced


async def _undone(tx: Transaction, definition: JobDefinition, tick: int) -> list[ProducedEvent]:
    """Ticks that were made while the clock was ahead are invalidated: a cursor never goes back by itself, and so
    nobody would be triggered until its time."""
    output = definition.outputs[0]
    cursor = await datasets.cursor_of(tx, output.dataset_version)
    if cursor is None or cursor <= tick:
        return []
    event = EventIn(
        dataset_uuid=output.dataset_uuid,
        id=f"clock {tick} {cursor}",
        invalidate=InvalidateRange(tick, cursor),
        reason="the clock was ahead when these ticks were made",
    )
    return await resolve_events(
        tx, Producer(definition.org_id, definition.job_id, active=True), definition, [event]
    )


def _scope(request: SourceRequest | WaitingRequest) -> dict[str, Any]:
    """A trigger is about the blocks that it names. Ticks and deliveries are counted up to their own number."""
    if request.kind is SourceKind.MANUAL:
        return dict(request.scope)
    return {"cursor": request.number}


async def _create_tasks(
    ctx: StepContext,
    tx: Transaction,
    definition: JobDefinition,
    requests: Sequence[tuple[int, SourceRequest | WaitingRequest]],
) -> CountedEvents:
    created = await sources.create_tasks(
        tx,
        definition.job_id,
        [
            (
                ctx.entropy.uuid(),
                request_id,
                {"kind": request.kind.value, "number": request.number, **request.scope},
            )
            for request_id, request in requests
        ],
    )
    await outbox.wake(tx, created)
    return CountedEvents(created=created)
