"""Events into rows: records each event, moves pointers by those that count, and routes them, in one transaction.

When an event counts: for storage ``none`` at once; for Postgres a cursor event is itself the commit of that cursor;
a partition with data behind it counts when a completion commits it. An event of a retired generation moves that
generation's pointers, forward or back, since a rollback may activate it again, but isn't routed; one that worked on
an older revision than its scope has now is only recorded.

``invalidate`` applies an invalidation: the version's revision rises, its cursor and its consumers' cursors are
rewound to before the range, partitions that hold any of it are no longer current, and the tasks that rebuild them
are created. Outputs that a dependent derived from the range are invalidated the same way, down to the last dataset,
if the dependent replaces its outputs; outputs that only append can't be. Work under way on the old data is refused
at its completion (``InputChanged``), by the revision it was claimed with.

Locks: the caller has locked its tasks. ``open_gates`` then locks jobs and dataset versions, in that order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal
from uuid import UUID

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.produced_events import ProducedEvent
from tracelake.dispatcher.steps.route_events import Counted, create_updates, route
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, Storage
from tracelake.domain.errors import Conflict
from tracelake.domain.events import CursorScope, EventState, InvalidationScope, PartitionScope
from tracelake.store import datasets, invalidations, outbox, tasks
from tracelake.store.datasets import Announcement, Consumer, CursorAdvance, StoredPartition, Version
from tracelake.store.db import Transaction
from tracelake.store.tasks import NewTask


@dataclass(slots=True)
class Gates:
    """The locks of a transaction: versions as they are now, and their consumers."""

    versions: dict[UUID, Version]
    consumers: list[Consumer]


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    event_id: int
    state: EventState
    revision: int


@dataclass(slots=True)
class CountedEvents:
    kept: list[RecordedEvent] = field(default_factory=list)
    created: list[NewTask] = field(default_factory=list)


async def open_gates(
    tx: Transaction,
    produced: Sequence[ProducedEvent],
    *,
    own_jobs: Iterable[UUID] = (),
    inputs: Iterable[UUID] = (),
) -> Gates:
    """Lock everything that these events may change, gated ``own_jobs``, and ``inputs`` that must not change."""
    written = {event.dataset_version for event in produced}
    consumers = await datasets.consumers(tx, written) if written else []
    jobs = set(own_jobs) | {consumer.job_id for consumer in consumers if consumer.gated}
    versions = written | set(inputs)
    invalidated = {e.dataset_version for e in produced if isinstance(e.scope, InvalidationScope)}
    # An invalidation reaches down to the last dataset, and every lock must be taken before the first write.
    for version in sorted(invalidated):
        more_versions, more_jobs = await invalidations.downstream(tx, version)
        versions |= more_versions
        jobs |= more_jobs
    await tasks.lock_gates(tx, jobs)
    # Commits to one version may run beside each other, but for those of a chain,
    # which must see their neighbours. An invalidation changes its revision and needs it alone.
    linked = any(event.edges is not None for event in produced)
    lock = datasets.hold_versions if linked else datasets.share_versions
    if invalidated:
        lock = datasets.own_versions
    return Gates(await lock(tx, versions) if versions else {}, consumers)


async def count_events(
    ctx: StepContext,
    tx: Transaction,
    produced: Sequence[ProducedEvent],
    gates: Gates,
    *,
    ended_updates: Iterable[UUID] = (),
) -> CountedEvents:
    """Record and count events in the order given. ``ended_updates`` are PerUpdate jobs whose task just ended."""
    result = CountedEvents()
    also = set(ended_updates)
    # The order counts: an event after an invalidation belongs to the new revision, one before it to the old.
    for is_invalidation, group in groupby(produced, key=lambda e: isinstance(e.scope, InvalidationScope)):
        segment = list(group)
        if is_invalidation:
            for event in segment:
                await _count_invalidation(ctx, tx, event, gates, result)
        else:
            await _count(ctx, tx, segment, gates, result, also)
            # Their jobs have been looked at by the first segment.
            also = set()
    if also:
        result.created += await route(ctx, tx, Counted(), [], also=also)
    return result


async def _count_invalidation(
    ctx: StepContext, tx: Transaction, event: ProducedEvent, gates: Gates, result: CountedEvents
) -> None:
    assert isinstance(event.scope, InvalidationScope)
    version = gates.versions[event.dataset_version]
    state: Literal[EventState.COUNTED, EventState.OLD_VERSION] = EventState.OLD_VERSION
    if event.producer.active and event.own:
        state = EventState.COUNTED
    if event.own:
        revision, created = await invalidate(
            ctx, tx, event.dataset_version, event.scope, task_id=event.producer.task_id
        )
        # Later events of the call must be judged by the new revision.
        gates.versions[event.dataset_version] = version = replace(version, revision=revision)
        result.created += created
    ids = await datasets.record_events(tx, [_row(event, version, state)])
    result.kept.append(RecordedEvent(ids[0], state, version.revision))


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
    recorded = iter(
        await datasets.record_events(
            tx,
            [
                _row(event, gates.versions[event.dataset_version], state)
                for event, state in zip(produced, states, strict=True)
                if event.event_id is None
            ],
        )
    )
    # A kept event is recorded already.
    ids = [next(recorded) if event.event_id is None else event.event_id for event in produced]
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
        bounded = all(event.producer.task_id is None for event in moving)
        result.created += await route(ctx, tx, routable, gates.consumers, also=also, bounded=bounded)
    for event, state, event_id in zip(produced, states, ids, strict=True):
        result.kept.append(RecordedEvent(event_id, state, gates.versions[event.dataset_version].revision))


def _state(event: ProducedEvent) -> EventState:
    if not event.own or not event.producer.active:
        return EventState.OLD_VERSION
    if event.producer.held:
        return EventState.HELD
    return EventState.COUNTED if _moves(event) else EventState.PENDING


def _moves(event: ProducedEvent) -> bool:
    """Whether this event commits its scope, rather than announce what a completion will commit."""
    if isinstance(event.scope, CursorScope) or event.storage is Storage.NONE:
        return True
    return event.materialized is not None


async def _outdated(tx: Transaction, produced: Sequence[ProducedEvent], gates: Gates) -> set[int]:
    """Indexes of events whose stated revision is older than that of their scope now."""
    suspects = [
        index
        for index, event in enumerate(produced)
        if event.revision is not None and event.revision < gates.versions[event.dataset_version].revision
    ]
    scopes = []
    for index in suspects:
        event = produced[index]
        start, end = event.scope.bounds
        # A cursor stands for every block up to it.
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
                announced.append(
                    Announcement(version, span, producer.task_id, producer.attempt, producer.bulk)
                )
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
                        producer.bulk,
                    )
                )
    scopes = await datasets.announce_scopes(tx, announced)
    scopes += await datasets.commit_partitions(tx, stored)
    before = await datasets.advance_cursors(tx, cursors)
    return Counted(
        scopes, [(c.dataset_version, before.get(c.dataset_version, c.cursor), c.cursor) for c in cursors]
    )


def _row(event: ProducedEvent, version: Version, state: EventState) -> datasets.EventRow:
    return datasets.EventRow(
        event.producer.org_id,
        event.dataset_version,
        event.producer.task_id,
        event.producer.attempt,
        event.scope.kind,
        event.scope.bounds,
        version.revision,
        state,
        event.producer.bulk,
    )


async def invalidate(
    ctx: StepContext, tx: Transaction, version: UUID, scope: InvalidationScope, *, task_id: UUID | None
) -> tuple[int, list[NewTask]]:
    """Apply an invalidation; the caller has locked every job and version downstream. Returns the revision and the
    tasks created. The same id again changes nothing; with another range it is a conflict."""
    known = await invalidations.known(tx, version, scope.id)
    if known is not None:
        if known.range != scope.range:
            raise Conflict(
                "InvalidationReused", f"invalidation {scope.id!r} was sent for {known.range.partition_key}"
            )
        return known.revision, []
    revision = await invalidations.record(tx, version, scope.id, scope.range, scope.reason, task_id)
    uncommitted = await invalidations.uncommit(tx, version, scope.range)
    # A partition goes as a whole, so consumers must repeat all of its blocks, not just the invalid ones.
    span = _hull([scope.range, *uncommitted])
    await invalidations.rewind_producer(tx, version, span.start)
    undo = await invalidations.rewind_consumers(tx, version, span, revision)
    created = await _invalidate_downstream(ctx, tx, version, scope, span, undo, task_id)
    rebuilt = await _rebuild(ctx, tx, version, uncommitted)
    rebuilt += await create_updates(ctx, tx, undo)
    await outbox.wake(tx, rebuilt)
    return revision, created + rebuilt


async def _invalidate_downstream(
    ctx: StepContext,
    tx: Transaction,
    version: UUID,
    scope: InvalidationScope,
    span: BlockRange,
    undo: set[UUID],
    task_id: UUID | None,
) -> list[NewTask]:
    created: list[NewTask] = []
    for dependent in await invalidations.dependents(tx, version):
        if dependent.output_version is None or not dependent.replaces:
            continue
        held = await invalidations.hull(tx, dependent.output_version, span)
        # A dependent that has derived nothing from the range yet has nothing to undo.
        made = held.partitions is not None or (held.cursor_beyond and dependent.job_id in undo)
        if not made:
            continue
        derived = InvalidationScope(
            _hull([span, held.partitions]) if held.partitions else span,
            _derived_id(scope.id, version, dependent.output_version),
            scope.reason,
        )
        _, more = await invalidate(ctx, tx, dependent.output_version, derived, task_id=task_id)
        created += more
    return created


async def _rebuild(
    ctx: StepContext, tx: Transaction, version: UUID, uncommitted: list[BlockRange]
) -> list[NewTask]:
    """A PerPartition producer gets a task for each partition whose inputs are still committed; the others follow
    when their inputs are. A PerUpdate one is rewound to the beginning of the first partition, of which only a part
    may have been invalidated."""
    if not uncommitted:
        return []
    job_id = await invalidations.producer_job(tx, version)
    if job_id is None:
        return []
    definition = (await ctx.definitions.get(tx, [job_id]))[job_id]
    if definition.execution_strategy is ExecutionStrategy.PER_UPDATE:
        await invalidations.rewind_job(tx, job_id, min(uncommitted).start)
        return await create_updates(ctx, tx, [job_id])
    if definition.execution_strategy is not ExecutionStrategy.PER_PARTITION:
        return []
    cause = {"kind": "invalidation", "dataset_version": str(version)}
    return await tasks.create_partition_tasks(
        tx, [(ctx.entropy.uuid(), job_id, span, cause) for span in sorted(uncommitted)]
    )


def _hull(ranges: list[BlockRange]) -> BlockRange:
    return BlockRange(min(span.start for span in ranges), max(span.end for span in ranges))


def _derived_id(parent: str, version: UUID, output: UUID) -> str:
    """One id per path through the graph, the same whenever the same invalidation is sent again."""
    return hashlib.sha256(f"{parent}/{version}/{output}".encode()).hexdigest()[:40]
