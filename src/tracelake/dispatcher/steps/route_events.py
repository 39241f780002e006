"""Step 2, route: creates the tasks of dependent jobs for everything that now counts, and their wake-ups.

PerPartition jobs get a task for each scope that all their triggering inputs have committed, but for those in
which no row can match (``skip_scopes``); PerUpdate jobs have one waiting task that reads up to wherever its inputs
are when it is claimed. Routing twice creates nothing twice: unique keys in the database see to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.skip_scopes import skip_scopes
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy
from tracelake.store import datasets, outbox, tasks
from tracelake.store.datasets import CommittedScope, Consumer
from tracelake.store.db import Transaction
from tracelake.store.tasks import NewTask


@dataclass(frozen=True, slots=True)
class Counted:
    """Newly committed scopes, and versions with their cursor before and now."""

    scopes: Sequence[CommittedScope] = ()
    cursors: Sequence[tuple[UUID, int, int]] = ()

    def versions(self) -> set[UUID]:
        return {scope.dataset_version for scope in self.scopes} | {version for version, _, _ in self.cursors}


async def route(
    ctx: StepContext,
    tx: Transaction,
    counted: Counted,
    consumers: Sequence[Consumer],
    *,
    also: Iterable[UUID] = (),
    bounded: bool = False,
) -> list[NewTask]:
    """Create the tasks of ``consumers`` for ``counted``; the caller holds their gates.

    ``bounded`` fills no queue beyond its threshold: what comes from outside may be any number of events before a
    look holds their source, while what a task emits ends with the task. ``also`` are PerUpdate jobs to check in any
    case: their own last task has just ended.
    """
    # Before tasks are made: an update is only created if its job's cursor lies behind its inputs.
    await _rewind_below(tx, counted, consumers)
    candidates = await _partition_candidates(ctx, tx, counted, consumers)
    skipped = await skip_scopes(ctx, tx, [(job, span) for _, job, span, _ in candidates])
    created = await tasks.create_partition_tasks(
        tx, [candidate for candidate in candidates if candidate[1:3] not in skipped], bounded=bounded
    )
    created += await create_updates(ctx, tx, _update_jobs(counted, consumers) | set(also))
    await outbox.wake(tx, created)
    return created


async def create_updates(ctx: StepContext, tx: Transaction, job_ids: Iterable[UUID]) -> list[NewTask]:
    return await tasks.create_cursor_tasks(
        tx, [(ctx.entropy.uuid(), job_id, {"kind": "update"}) for job_id in sorted(job_ids)]
    )


async def _partition_candidates(
    ctx: StepContext, tx: Transaction, counted: Counted, consumers: Sequence[Consumer]
) -> list[tuple[UUID, UUID, BlockRange, dict[str, Any]]]:
    per_partition = [c for c in consumers if c.strategy is ExecutionStrategy.PER_PARTITION]
    by_version: dict[UUID, list[Consumer]] = {}
    for consumer in per_partition:
        by_version.setdefault(consumer.dataset_version, []).append(consumer)
    scopes = [
        (consumer.job_id, scope.range, scope.dataset_version)
        for scope in counted.scopes
        for consumer in by_version.get(scope.dataset_version, ())
    ]
    joins = [
        (consumer.job_id, version, before, cursor)
        for version, before, cursor in counted.cursors
        for consumer in by_version.get(version, ())
        # With one triggering input the scope itself makes the task; a cursor only completes scopes of joins.
        if consumer.trigger_count > 1
    ]
    reached = await datasets.scopes_reached_by_cursor(tx, joins)
    candidates = [
        (job, span, {"kind": "scope", "dataset_version": str(version)}) for job, span, version in scopes
    ]
    candidates += [(job, span, {"kind": "cursor"}) for job, span in reached]
    return [(ctx.entropy.uuid(), job, span, cause) for job, span, cause in candidates]


def _update_jobs(counted: Counted, consumers: Sequence[Consumer]) -> set[UUID]:
    versions = counted.versions()
    return {
        consumer.job_id
        for consumer in consumers
        if consumer.strategy is ExecutionStrategy.PER_UPDATE and consumer.dataset_version in versions
    }


async def _rewind_below(tx: Transaction, counted: Counted, consumers: Sequence[Consumer]) -> None:
    """Rewind PerUpdate jobs that have already read beyond a newly committed partition."""
    per_update = [c for c in consumers if c.strategy is ExecutionStrategy.PER_UPDATE]
    await datasets.rewind_below_commit(
        tx,
        [
            (consumer.job_id, consumer.input_index, scope.range.start)
            for scope in counted.scopes
            if scope.changed
            for consumer in per_update
            if consumer.dataset_version == scope.dataset_version
        ],
    )
