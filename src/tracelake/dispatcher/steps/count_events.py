"""Events into rows: each is kept, those that count move the pointers and are routed, in one transaction.

When an event counts: for storage ``none`` at once; for Postgres a cursor event is itself the commit of that
cursor; a partition with data behind it counts when a completion commits it. An event of a retired
generation moves that generation's pointers, forward or back (a rollback may bring it back), and is not routed;
one that worked on an older revision than its scope has now is only kept.

Locks: the caller has locked its tasks. ``open_gates`` then locks jobs and dataset versions, in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal
from uuid import UUID

from tracelake.dispatcher.steps import invalidate
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.produced_events import ProducedEvent
from tracelake.dispatcher.steps.route_events import Counted, route
from tracelake.domain.dag.model import Storage
from tracelake.domain.events import CursorScope, EventState, InvalidationScope, PartitionScope
from tracelake.store import datasets, events, invalidations, tasks
from tracelake.store.datasets import Announcement, Consumer, CursorAdvance, StoredPartition, Version
from tracelake.store.db import Transaction
from tracelake.store.tasks import NewTask


@dataclass(slots=True)
class Gates:
    """What a transaction has locked: the versions as they are, and who consumes them."""

    versions: dict[UUID, Version]
    consumers: list[Consumer]


@dataclass(frozen=True, slots=True)
class KeptEvent:
    event_id: int
    state: EventState
    revision: int


@dataclass(slots=True)
class CountedEvents:
    kept: list[KeptEvent] = field(default_factory=list)
    created: list[NewTask] = field(default_factory=list)


async def open_gates(
    tx: Transaction,
    produced: Sequence[ProducedEvent],
    *,
    own_jobs: Iterable[UUID] = (),
    inputs: Iterable[UUID] = (),
) -> Gates:
    """Lock what these events may touch, ``own_jobs`` that are gated, and ``inputs`` that must not change."""
    written = {event.dataset_version for event in produced}
    consumers = await datasets.consumers(tx, written) if written else []
    jobs = set(own_jobs) | {consumer.job_id for consumer in consumers if consumer.gated}
    versions = written | set(inputs)
    taken_back = {e.dataset_version for e in produced if isinstance(e.scope, InvalidationScope)}
    for version in sorted(taken_back):
        more_versions, more_jobs = await invalidations.downstream(tx, version)
        versions |= more_versions
        jobs |= more_jobs
    await tasks.lock_gates(tx, jobs)
    lock = datasets.own_versions if taken_back else datasets.share_versions
    return Gates(await lock(tx, versions) if versions else {}, consumers)


async def count_events(
    ctx: StepContext,
    tx: Transaction,
    produced: Sequence[ProducedEvent],
    gates: Gates,
    *,
    ended_updates: Iterable[UUID] = (),
) -> CountedEvents:
    """Keep and count events in the order given. ``ended_updates`` are PerUpdate jobs whose task just ended."""
    result = CountedEvents()
    also = set(ended_updates)
    for is_invalidation, group in groupby(produced, key=lambda e: isinstance(e.scope, InvalidationScope)):
        segment = list(group)
        if is_invalidation:
            for event in segment:
                await _take_back(ctx, tx, event, gates, result)
        else:
            await _count(ctx, tx, segment, gates, result, also)
            also = set()
    if also:
        result.created += await route(ctx, tx, Counted(), [], also=also)
    return result


async def _take_back(
    ctx: StepContext, tx: Transaction, event: ProducedEvent, gates: Gates, result: CountedEvents
) -> None:
    assert isinstance(event.scope, InvalidationScope)
    version = gates.versions[event.dataset_version]
    state: Literal[EventState.COUNTED, EventState.OLD_VERSION] = EventState.OLD_VERSION
    if event.producer.active and event.own:
        state = EventState.COUNTED
    if event.own:
        revision, created = await invalidate.invalidate(
            ctx, tx, event.dataset_version, event.scope, task_id=event.producer.task_id
        )
        gates.versions[event.dataset_version] = version = replace(version, revision=revision)
        result.created += created
    ids = await events.record(tx, [_row(event, version, state)])
    result.kept.append(KeptEvent(ids[0], state, version.revision))


async def _count(
    ctx: StepContext,
    tx: Transaction,
    produced: Sequence[ProducedEvent],
    gates: Gates,
    result: CountedEvents,
    also: set[UUID],
) -> None:
    outdated = await _outdated(tx, produced, gates)
    states = [
        EventState.OLD_REVISION if index in outdated else _state(event)
        for index, event in enumerate(produced)
    ]
    ids = await events.record(
        tx,
        [
            _row(event, gates.versions[event.dataset_version], state)
            for event, state in zip(produced, states, strict=True)
        ],
    )
    moving = [
        event
        for event, state in zip(produced, states, strict=True)
        if state is EventState.COUNTED or (state is EventState.OLD_VERSION and event.own and _moves(event))
    ]
    counted = await _move_pointers(tx, moving, gates)
    active = {event.dataset_version for event in moving if event.producer.active}
    routable = Counted(
        [scope for scope in counted.scopes if scope.dataset_version in active],
        [cursor for cursor in counted.cursors if cursor[0] in active],
    )
    if routable.scopes or routable.cursors or also:
        result.created += await route(ctx, tx, routable, gates.consumers, also=also)
    for event, state, event_id in zip(produced, states, ids, strict=True):
        result.kept.append(KeptEvent(event_id, state, gates.versions[event.dataset_version].revision))


def _state(event: ProducedEvent) -> EventState:
    if not event.own or not event.producer.active:
        return EventState.OLD_VERSION
    return EventState.COUNTED if _moves(event) else EventState.PENDING


def _moves(event: ProducedEvent) -> bool:
    """Does this event commit its scope, or only announce what a completion will commit?"""
    if isinstance(event.scope, CursorScope) or event.storage is Storage.NONE:
        return True
    return event.materialized is not None


async def _outdated(tx: Transaction, produced: Sequence[ProducedEvent], gates: Gates) -> set[int]:
    """Events that say they worked on an older revision than their scope has now."""
    suspects = [
        index
        for index, event in enumerate(produced)
        if event.revision is not None and event.revision < gates.versions[event.dataset_version].revision
    ]
    scopes = []
    for index in suspects:
        event = produced[index]
        start, end = event.scope.bounds
        scopes.append((event.dataset_version, 0 if isinstance(event.scope, CursorScope) else start, end))
    revisions = await invalidations.scope_revisions(tx, scopes)
    return {
        index
        for index, revision in zip(suspects, revisions, strict=True)
        if revision > (produced[index].revision or 0)
    }


async def _move_pointers(tx: Transaction, moving: Sequence[ProducedEvent], gates: Gates) -> Counted:
    announced, stored, cursors = [], [], []
    for event in moving:
        version, producer = gates.versions[event.dataset_version], event.producer
        match event.scope:
            case CursorScope(cursor, finalized):
                cursors.append(CursorAdvance(event.dataset_version, cursor, finalized))
            case PartitionScope(span) if event.storage is Storage.NONE:
                announced.append(Announcement(version, span, producer.task_id, producer.attempt))
            case PartitionScope(span):
                assert event.materialized is not None
                assert producer.task_id is not None
                assert producer.attempt is not None
                assert producer.epoch is not None
                stored.append(
                    StoredPartition(
                        version,
                        span,
                        producer.task_id,
                        producer.attempt,
                        producer.epoch,
                        event.materialized.location,
                        event.materialized.manifest,
                        event.materialized.row_count,
                    )
                )
    scopes = await datasets.announce_scopes(tx, announced)
    scopes += await datasets.commit_partitions(tx, stored)
    before = await datasets.advance_cursors(tx, cursors)
    return Counted(
        scopes, [(c.dataset_version, before.get(c.dataset_version, c.cursor), c.cursor) for c in cursors]
    )


def _row(event: ProducedEvent, version: Version, state: EventState) -> events.EventRow:
    return events.EventRow(
        event.producer.org_id,
        event.dataset_version,
        event.producer.task_id,
        event.producer.attempt,
        event.scope.kind,
        event.scope.bounds,
        version.revision,
        state,
    )
