"""Invalidate: a range is taken back, and everything that came of it goes back with it.

In one transaction: the version's revision rises, its cursor and its consumers' cursors go back to before the
range, partitions that hold any of it are no longer current, and the tasks that put things right are created.
What a dependent had made of the range, where it replaces its outputs, is taken back the same way, down to the
last dataset; outputs that only append can't be. Work under way on the old data is refused at its completion
(``InputChanged``), by the revision it was claimed with.
"""

from __future__ import annotations

import hashlib
from uuid import UUID

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.route_events import create_updates
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy
from tracelake.domain.errors import Conflict
from tracelake.domain.events import InvalidationScope
from tracelake.store import invalidations, outbox, tasks
from tracelake.store.db import Transaction
from tracelake.store.tasks import NewTask


async def invalidate(
    ctx: StepContext, tx: Transaction, version: UUID, scope: InvalidationScope, *, task_id: UUID | None
) -> tuple[int, list[NewTask]]:
    """Take ``scope`` back; the caller holds every job and version downstream. Returns the revision and the
    tasks created. The same id again changes nothing; with another range it is a conflict."""
    known = await invalidations.known(tx, version, scope.id)
    if known is not None:
        if known.range != scope.range:
            raise Conflict(
                "InvalidationReused", f"invalidation {scope.id!r} was said of {known.range.partition_key}"
            )
        return known.revision, []
    revision = await invalidations.record(tx, version, scope.id, scope.range, scope.reason, task_id)
    uncommitted = await invalidations.uncommit(tx, version, scope.range)
    span = _hull([scope.range, *uncommitted])
    await invalidations.rewind_producer(tx, version, span.start)
    undo = await invalidations.rewind_consumers(tx, version, span, revision)
    created = await _take_back_downstream(ctx, tx, version, scope, span, undo, task_id)
    rebuilt = await _rebuild(ctx, tx, version, uncommitted)
    rebuilt += await create_updates(ctx, tx, undo)
    await outbox.wake(tx, rebuilt)
    return revision, created + rebuilt


async def _take_back_downstream(
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
    """A PerPartition producer makes its partitions again, those whose inputs are still there now; the others
    follow when their inputs are committed again. A PerUpdate one goes back to where the first of them began:
    what was taken back may be only a part of it."""
    if not uncommitted:
        return []
    job_id = await invalidations.producer_job(tx, version)
    if job_id is None:
        return []
    card = (await ctx.cards.get(tx, [job_id]))[job_id]
    if card.execution_strategy is ExecutionStrategy.PER_UPDATE:
        await invalidations.rewind_job(tx, job_id, min(uncommitted).start)
        return await create_updates(ctx, tx, [job_id])
    if card.execution_strategy is not ExecutionStrategy.PER_PARTITION:
        return []
    cause = {"kind": "invalidation", "dataset_version": str(version)}
    return await tasks.create_partition_tasks(
        tx, [(ctx.entropy.uuid(), job_id, span, cause) for span in sorted(uncommitted)]
    )


def _hull(ranges: list[BlockRange]) -> BlockRange:
    return BlockRange(min(span.start for span in ranges), max(span.end for span in ranges))


def _derived_id(parent: str, version: UUID, output: UUID) -> str:
    """One per path through the graph, the same whenever the same invalidation comes again."""
    return hashlib.sha256(f"{parent}/{version}/{output}".encode()).hexdigest()[:40]
